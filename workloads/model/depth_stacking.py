"""Deeper models that begin as copies of a shallower one.

Progressive stacking (Gong et al., 2019, "Efficient Training of BERT by Progressively Stacking", section 4): the trained
layers are copied on top of themselves, in order. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from workloads.errors import WorkloadError

LAYER = re.compile(r"^(.*?)layers\.(\d+)\.(.+)$")
"""Stack, number and rest of the name of a layer's tensor."""


def stacked(base: Collection[str], model: Collection[str], where: str) -> Mapping[str, str]:
    """The tensor of the base as which each tensor of a further layer of the model begins.

    Raises WorkloadError if a stack of the model has not a multiple of the layers of the base at `where`.
    """
    theirs, ours = _layers(base), _layers(model)
    for stack, count in ours.items():
        if stack in theirs and (count % theirs[stack] or count == theirs[stack]):
            raise WorkloadError(
                f"{where} has {theirs[stack]} {stack}layers, and workload.model {count}; a model that is stacked has "
                "two or more times as many"
            )
    found = {}
    for name in model:
        match = LAYER.match(name)
        if match and name not in base and match[1] in theirs:
            found[name] = f"{match[1]}layers.{int(match[2]) % theirs[match[1]]}.{match[3]}"
    return {name: source for name, source in found.items() if source in base}


def _layers(names: Collection[str]) -> dict[str, int]:
    """The number of layers of each stack."""
    found: dict[str, int] = {}
    for match in filter(None, map(LAYER.match, names)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found

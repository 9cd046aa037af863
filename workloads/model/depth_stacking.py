"""Initialise a deeper model with copies of a shallower model's layers.

Progressive stacking (Gong et al., 2019, "Efficient Training of BERT by Progressively Stacking", section 4): the trained
layers are copied on top of themselves, in order. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from workloads.errors import WorkloadError

LAYER = re.compile(r"^(.*?)layers\.(\d+)\.(.+)$")
"""Splits a layer's tensor name into stack, layer number and rest."""


def stacked(base: Collection[str], model: Collection[str], where: str) -> Mapping[str, str]:
    """Map each tensor of an added layer of the model to the base's tensor that initialises it.

    Raises WorkloadError unless the depth of each stack is a multiple of that of the base at `where`.

    Args:
        base: names of the base's tensors.
        model: names of the model's tensors.
        where: the base, for the message.
    """
    theirs = _layers(base)
    ours = _layers(model)
    for stack, count in ours.items():
        if stack in theirs and (count % theirs[stack] or count == theirs[stack]):
            raise WorkloadError(
                f"{where} has {theirs[stack]} {stack}layers, but workload.model {count}; a stacked model has "
                "two or more times as many"
            )
    sources = {}
    for name in model:
        match = LAYER.match(name)
        if match and name not in base and match[1] in theirs:
            sources[name] = f"{match[1]}layers.{int(match[2]) % theirs[match[1]]}.{match[3]}"
    return {name: source for name, source in sources.items() if source in base}


def _layers(names: Collection[str]) -> dict[str, int]:
    """Return the number of layers of each stack."""
    depths: dict[str, int] = {}
    for match in filter(None, map(LAYER.match, names)):
        depths[match[1]] = max(depths.get(match[1], 0), int(match[2]) + 1)
    return depths

"""Parameters that are not trained, by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from workloads.errors import WorkloadError
from workloads.workload import Workload

SHOWN = 3
"""Most names that a message proposes."""


def parameters_of(workload: Workload) -> list[str]:
    """The names of the model's parameters; buffers are none."""
    with torch.device("meta"):
        model: nn.Module = workload.build()
    return [name for name, _ in model.named_parameters()]


def matching(patterns: Iterable[str], names: Collection[str], what: str) -> frozenset[str]:
    """The names that any of the patterns (fnmatch) matches. Raises WorkloadError, which says `what` was looked for, if
    one of them matches none."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            near = get_close_matches(pattern, names, SHOWN, 0.0)
            raise WorkloadError(f"{pattern!r} matches no {what}; the nearest are {', '.join(near)}")
        found |= matched
    return frozenset(found)


def frozen_by(patterns: Collection[str], workload: Workload) -> frozenset[str]:
    """The parameters of a workload that `patterns` freeze. Raises WorkloadError if one matches none, or all are."""
    if not patterns:
        return frozenset()
    names = parameters_of(workload)
    found = matching(patterns, names, "parameter")
    if len(found | workload.frozen) == len(names):
        raise WorkloadError(f"{', '.join(patterns)} freeze all parameters; leave some to be trained")
    return found

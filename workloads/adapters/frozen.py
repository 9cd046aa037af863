"""Frozen parameters, selected by patterns of their names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from workloads.errors import WorkloadError
from workloads.workload import Workload

SHOWN = 3
"""Maximum number of names that a message suggests."""
ALL = "all-linear"
"""peft's name for all linear layers."""


class Unmatched(WorkloadError):
    """A pattern that matches none of `names`. The message calls the names `what`."""

    def __init__(self, pattern: str, kind: str, names: Collection[str]) -> None:
        self.pattern = pattern
        self.what = kind
        self.names = names
        near = ", ".join(get_close_matches(pattern, names, SHOWN, 0.0))
        longer = [
            each
            for each in (f"*.{pattern}", f"*.{pattern}.*")
            if any(fnmatchcase(name, each) for name in names)
        ]
        longer = ["*"] if pattern == ALL else longer
        hint = f"write {longer[0]!r}" if longer else f"the nearest are {near}" if near else "there is none"
        super().__init__(f"{pattern!r} matches no {kind}; {hint}")


def parameters_of(workload: Workload) -> list[str]:
    """Return the names of the model's parameters, without buffers."""
    with torch.device("meta"):
        model: nn.Module = workload.build()
    return [name for name, _ in model.named_parameters()]


def matching(patterns: Iterable[str], names: Collection[str], kind: str) -> frozenset[str]:
    """Return the names that at least one of the patterns (fnmatch) matches.

    Raises:
        Unmatched: if a pattern matches no name. The message says `kind` for the names, such as "parameter".
    """
    matches: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise Unmatched(pattern, kind, names)
        matches |= matched
    return frozenset(matches)


def thawed_after(thaw: Mapping[int, Sequence[str]], frozen: Collection[str]) -> dict[str, int]:
    """Return the step after which each thawed parameter is trained: the first whose patterns in `thaw` match it.

    Raises:
        WorkloadError: if a pattern matches no frozen parameter.
    """
    steps: dict[str, int] = {}
    for step, patterns in sorted(thaw.items(), reverse=True):
        steps |= dict.fromkeys(matching(patterns, sorted(frozen), "frozen parameter"), step)
    return steps


def after(workload: Workload, step: int) -> Workload:
    """Return the workload with the parameters that are still frozen after `step` steps."""
    left = frozenset(name for name in workload.frozen if workload.thawed_after.get(name, math.inf) > step)
    return workload if left == workload.frozen else replace(workload, frozen=left)  # type: ignore[type-var]


def check_groups(groups: Iterable[Sequence[str]], workload: Workload) -> None:
    """Raise WorkloadError if a pattern matches no trained parameter that is not already in an earlier group."""
    still = workload.frozen - workload.thawed_after.keys()
    left = {name for name in parameters_of(workload) if name not in still} if groups else set()
    for patterns in groups:
        left -= matching(patterns, sorted(left), "trained parameter that no group before it has")


def frozen_by(patterns: Collection[str], workload: Workload) -> frozenset[str]:
    """Return the parameters that `patterns` freeze.

    Raises:
        WorkloadError: if a pattern matches no parameter, or if all parameters would be frozen.
    """
    if not patterns:
        return frozenset()
    names = parameters_of(workload)
    frozen = matching(patterns, names, "parameter")
    if len(frozen | workload.frozen) == len(names):
        raise WorkloadError(f"{', '.join(patterns)} freeze all parameters; leave some to be trained")
    return frozen

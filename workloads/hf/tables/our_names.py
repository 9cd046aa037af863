"""Hints for patterns that match transformers' names: the corresponding names here, by a family's table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Protocol

from workloads.adapters.frozen import SHOWN, Unmatched
from workloads.errors import WorkloadError
from workloads.hf.tables.convert import row_of
from workloads.hf.tables.families import FAMILIES
from workloads.hf.tables.family import Family
from workloads.model.config import TransformerConfig

LEAF = re.compile(r"\.(weight|bias)$")


class Described(Protocol):
    """The description of a model, see `workloads.describe`."""

    @property
    def as_transformer(self) -> TransformerConfig | None:
        """Return our configuration if it says everything that the model computes."""


@contextmanager
def in_our_names(model: Described | None) -> Iterator[None]:
    """Re-raise Unmatched with our name for its pattern, if the pattern matches transformers' names for tensors of
    `model`.
    """
    try:
        yield
    except Unmatched as error:
        config = model.as_transformer if model is not None else None
        ours = our_names(config, error.names, error.pattern) if config is not None else []
        if not ours:
            raise
        problem = f"{error.pattern!r} matches no {error.what}: it is a name of transformers"
        raise WorkloadError(f"{problem}; write {' and '.join(ours)}") from None


def our_names(config: TransformerConfig, names: Collection[str], pattern: str) -> list[str]:
    """Return patterns for those of our `names` (tensors or modules) whose transformers name `pattern` matches, in
    full or at its end.

    Empty without a match, or if too many kinds match.
    """
    matches: list[str] = []
    for family in (FAMILIES.get(config.family), *FAMILIES.values()):
        if family and not matches:  # for example q_proj is in many classes
            matches = [
                n for n in names if any(_matches(pattern, each) for each in _theirs(family, config, n))
            ]
    if not matches:
        return []
    parts = zip(*(name.split(".") for name in matches), strict=False)
    shared = [each[0] for each in parts if len(set(each)) == 1]
    prefix_pattern = ".".join([*shared, "*"])
    if len(matches) > 1 and {name for name in names if fnmatchcase(name, prefix_pattern)} == {*matches}:
        return [prefix_pattern]
    any_layer = [name if re.search(r"\d", pattern) else re.sub(r"\.\d+\.", ".*.", name) for name in matches]
    if not LEAF.search(pattern):
        any_layer = [LEAF.sub(".*", name) for name in any_layer]
    ours = list(dict.fromkeys(any_layer))
    return ours if len(ours) <= SHOWN else []


def _theirs(family: Family, config: TransformerConfig, name: str) -> Iterator[str]:
    """Return transformers' names of our tensor, or of the module that has it."""
    for leaf in ("", ".weight"):
        try:
            row, _, number = row_of(family, config, name + leaf)
        except (WorkloadError, LookupError):  # the class lacks this model's head
            continue
        theirs = row.hf_name.replace("{n}", number).replace("{e}", "0")
        yield from (theirs, LEAF.sub("", theirs))
        return


def _matches(pattern: str, name: str) -> bool:
    return any(
        fnmatchcase(name, each) for each in (pattern, f"*.{pattern}", pattern.partition(".")[2] or pattern)
    )

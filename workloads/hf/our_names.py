"""Patterns of transformers' own names, in hints: what they are called here, by a family's table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from workloads.adapters.frozen import SHOWN, Unmatched
from workloads.errors import WorkloadError
from workloads.hf.convert import row_of
from workloads.hf.families import FAMILIES
from workloads.hf.family import Family
from workloads.model.config import TransformerConfig

LEAF = re.compile(r"\.(weight|bias)$")


@contextmanager
def told_by_our_names(model: object) -> Iterator[None]:
    """Raise Unmatched anew with what its pattern is called here, where it is one of names that transformers has for
    tensors of `model`, the configuration."""
    try:
        yield
    except Unmatched as error:
        ours = our_names(model, error.names, error.pattern) if isinstance(model, TransformerConfig) else []
        if not ours:
            raise
        what = f"{error.pattern!r} matches no {error.what}: it is a name of transformers"
        raise WorkloadError(f"{what}; write {' and '.join(ours)}") from None


def our_names(config: TransformerConfig, names: Collection[str], pattern: str) -> list[str]:
    """Patterns of those of our `names`, of tensors or of modules, for which transformers has one that `pattern` matches
    in whole or as its end; empty if there are none, or too many kinds of them."""
    found: list[str] = []
    for family in (FAMILIES.get(config.family), *FAMILIES.values()):
        if family and not found:  # many say q_proj, of whatever class the model is
            found = [n for n in names if any(_matches(pattern, each) for each in _theirs(family, config, n))]
    if not found:
        return []
    parts = zip(*(name.split(".") for name in found), strict=False)
    shared = [each[0] for each in parts if len(set(each)) == 1]
    whole = ".".join([*shared, "*"])
    if len(found) > 1 and {name for name in names if fnmatchcase(name, whole)} == {*found}:
        return [whole]
    any_layer = [name if re.search(r"\d", pattern) else re.sub(r"\.\d+\.", ".*.", name) for name in found]
    if not LEAF.search(pattern):
        any_layer = [LEAF.sub(".*", name) for name in any_layer]
    ours = list(dict.fromkeys(any_layer))
    return ours if len(ours) <= SHOWN else []


def _theirs(family: Family, config: TransformerConfig, name: str) -> Iterator[str]:
    """The names in transformers of our tensor, or of the module that has it."""
    for leaf in ("", ".weight"):
        try:
            row, _, number = row_of(family, config, name + leaf)
        except (WorkloadError, LookupError):  # a class without this model's head
            continue
        theirs = row.hf_name.replace("{n}", number).replace("{e}", "0")
        yield from (theirs, LEAF.sub("", theirs))
        return


def _matches(pattern: str, name: str) -> bool:
    return any(
        fnmatchcase(name, each) for each in (pattern, f"*.{pattern}", pattern.partition(".")[2] or pattern)
    )

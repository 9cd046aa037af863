"""The inner states of a transformer that a forward pass returns besides its results. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Relation = Literal["attention", "scores", "queries", "keys", "values"]
MAPS = "distill"
"""The first part of the names of learned maps. They are no part of the model, and exports leave them out."""


@dataclass(frozen=True)
class Shows:
    """The inner states that a model returns.

    Attributes:
        hidden: the layers whose outputs it shows, counted from 1; 0 is what enters the first.
        relations: pairs of a relation and the layer within whose attention it is taken.
        heads: relation heads of queries, keys and values; 0 for the attention heads.
        maps: by layer, the width to which a learned map takes its output.
    """

    hidden: tuple[int, ...] = ()
    relations: tuple[tuple[Relation, int], ...] = ()
    heads: int = 0
    maps: Mapping[int, int] = field(default_factory=dict, hash=False)


def is_map(name: str) -> bool:
    """Return whether a parameter belongs to a learned map."""
    return name.startswith(f"{MAPS}.")

"""What a rank of a hanging gang tells the controller before it is killed. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entered:
    """A collective that a rank has entered."""

    group: str
    """The process group, by its library and name."""
    number: int
    """Its number among the group's collectives."""
    text: str
    """The collective, for people: its number, its ranks, its kind and its sizes."""
    is_done: bool
    """Whether it is completed on this rank."""
    ranks: tuple[int, ...] = ()
    """The ranks of the group; empty if unknown."""


@dataclass(frozen=True)
class HangReport:
    """What a rank does while its gang hangs."""

    entered: tuple[Entered, ...] = ()
    """The last completed collective of each process group, and the first that is not completed. The newest of a library
    are the last.
    """
    frame: str = ""
    """The innermost Python function of its main thread, for people."""
    is_waiting: bool = False
    """Whether that function waits for other ranks."""
    is_computing: bool = False
    """Whether its main thread has used the processor lately, so that it may only be slow."""
    is_overdue: bool = False
    """Whether this stands for the report of a rank that sends heartbeats but has not answered yet."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HangReport:
        """Return the report that `dataclasses.asdict` has made of one."""
        entered = tuple(Entered(**{**each, "ranks": tuple(each["ranks"])}) for each in data["entered"])
        return cls(**{**data, "entered": entered})

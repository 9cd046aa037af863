"""Many small reads of a store, several of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")

AT_ONCE = 16
"""Reads under way at once: a store answers one in tens of milliseconds, and many as soon as one."""


def read_at_once(
    read: Callable[[Item], Found], items: Iterable[Item], held: int | None = None
) -> Iterator[Found]:
    """What `read` gives of each item, in their order; it is called in several threads. What it raises is raised here.

    held: so many results at most are in memory beside those that were taken, for results that are large; None for all.
    """
    left = iter(items)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while some := list(islice(left, held)):
            yield from pool.map(read, some)

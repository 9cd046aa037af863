"""Read many small files of a store in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")

AT_ONCE = 16
"""Number of parallel reads. A store answers one in tens of milliseconds, and many in the same time."""


def read_at_once(
    read: Callable[[Item], Found], items: Iterable[Item], held: int | None = None
) -> Iterator[Found]:
    """Yield `read(item)` for each item, in order, while `read` runs in several threads. Its errors are raised here.

    Args:
        read: reads one item.
        items: the items.
        held: maximum number of unconsumed results in memory, for large results; None for no limit.
    """
    left = iter(items)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while some := list(islice(left, held)):
            yield from pool.map(read, some)

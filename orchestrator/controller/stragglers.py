"""Which rank holds the others up, from the seconds that each worked by itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

RATIO = 1.5
"""Times the lower median of all ranks that one must take to be slow."""
LEAST = 0.02
"""Seconds by which it must be slower: less is noise."""
STEADY = 5
"""Steps in a row after which it is told."""


class Stragglers:
    """Looks at step after step."""

    def __init__(self) -> None:
        self._rank, self._steps = -1, 0

    def see(self, busy: Sequence[float]) -> tuple[int, float] | None:
        """The rank that has been slowest for STEADY steps, and how many times the median it took; told once.

        Args:
            busy: seconds of each rank in one step; empty or zeros where the layout does not tell.
        """
        middle = statistics.median_low(busy) if len(busy) > 1 else 0.0
        slowest = max(busy, default=0.0)
        if not middle or slowest < RATIO * middle or slowest - middle < LEAST:
            self._rank, self._steps = -1, 0
            return None
        rank = list(busy).index(slowest)
        self._steps = self._steps + 1 if rank == self._rank else 1
        self._rank = rank
        return (rank, slowest / middle) if self._steps == STEADY else None

"""Ranks that are slow step after step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

RATIO = 1.5
"""A rank is slow if it takes this many times the lower median of all ranks."""
MIN_SECONDS = 0.02
"""A rank is slow only if it takes this many seconds more than the median: less is noise."""
STEADY = 5
"""Steps in a row for which a rank must be the slowest before it is reported."""


class Stragglers:
    """Finds a rank that is slow step after step."""

    def __init__(self) -> None:
        self._rank = -1
        """The slow rank of the last step, -1 without one."""
        self._steps = 0
        """For how many steps it has been the slow rank."""

    def see(self, busy: Sequence[float]) -> tuple[int, float] | None:
        """Return the rank that has now been slow for STEADY steps, and its ratio to the median. Reports it once.

        Args:
            busy: seconds of each rank in one step; empty or zeros under layouts that do not report it.
        """
        middle = statistics.median_low(busy) if len(busy) > 1 else 0.0
        slowest = max(busy, default=0.0)
        if not middle or slowest < RATIO * middle or slowest - middle < MIN_SECONDS:
            self._rank = -1
            self._steps = 0
            return None
        rank = list(busy).index(slowest)
        self._steps = self._steps + 1 if rank == self._rank else 1
        self._rank = rank
        return (rank, slowest / middle) if self._steps == STEADY else None

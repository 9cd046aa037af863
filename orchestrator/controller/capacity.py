"""How many workers of a run could run at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set

from cluster.workers.gang import Bundle, Gang
from orchestrator.controller.health import Failure, excluded
from orchestrator.controller.state import Phase

COUNT_EVERY = 2.0
"""Seconds between two counts while ranks run."""


class Capacity:
    """Counts the workers that could run, for ranks of one size.

    Attributes:
        avoid: addresses of nodes that get no ranks because too many have failed there, or because they compute wrongly.
            The former are avoided only while the others have room for `least` workers.
        last: the last count; 0 before.
    """

    def __init__(self, gang: Gang, bundle: Bundle, min_workers: int) -> None:
        self._gang = gang
        self._bundle = bundle
        self._min_workers = min_workers
        self.last = 0
        self._counted_at = 0.0
        self.avoid: Set[str] = frozenset()

    def count(
        self,
        phase: Phase,
        failures: Sequence[Failure],
        now: float,
        other_workers: Callable[[Set[str]], int],
        wrong: frozenset[str] = frozenset(),
    ) -> int:
        """Return how many workers could run. In phases in which it does not matter, return the last count.

        Args:
            phase: the phase of the run.
            failures: recent faults, which say what nodes to avoid.
            now: monotonic time, in seconds.
            other_workers: gets the nodes to avoid, and returns how many workers the run has on other nodes besides its
                gang. The count includes them.
            wrong: addresses of nodes that compute wrongly. They are avoided even if the others have too little room.
        """
        waited = time.monotonic() - self._counted_at
        if phase == "wait" or (phase in ("train", "evaluate") and waited > COUNT_EVERY):
            self._counted_at = time.monotonic()
            self.avoid = excluded(failures, now) | wrong
            self.last = self._gang.capacity(self._bundle, self.avoid) + other_workers(self.avoid)
            if self.avoid != wrong and self.last < self._min_workers:
                self.avoid = wrong
                self.last = self._gang.capacity(self._bundle, wrong) + other_workers(wrong)
        return self.last

"""How many workers could run: counted now and then, without the nodes that have failed too often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set

from cluster.workers.gang import Bundle, Gang
from orchestrator.controller.health import Failure, excluded
from orchestrator.controller.state import Phase

COUNT_EVERY = 2.0
"""Seconds between counts beside running ranks."""


class Capacity:
    """Of a gang, for ranks of that size; nodes are left out in `avoid` only while the others hold `least` ranks."""

    def __init__(self, gang: Gang, bundle: Bundle, least: int) -> None:
        self._gang, self._bundle, self._least = gang, bundle, least
        self._count, self._counted = 0, 0.0
        self.avoid: Set[str] = frozenset()

    def count(self, phase: Phase, failures: Sequence[Failure], now: float, beside: Callable[[], int]) -> int:
        """Workers that could run, those that are held `beside` included; the last count where it does not matter."""
        waited = time.monotonic() - self._counted
        if phase == "wait" or (phase in ("train", "evaluate") and waited > COUNT_EVERY):
            self._counted = time.monotonic()
            self.avoid = excluded(failures, now)
            held = beside()
            self._count = self._gang.capacity(self._bundle, self.avoid) + held
            if self.avoid and self._count < self._least:
                self.avoid, self._count = frozenset(), self._gang.capacity(self._bundle) + held
        return self._count

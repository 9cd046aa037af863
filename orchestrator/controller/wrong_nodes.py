"""Take nodes that compute wrongly out of the cluster."""

from __future__ import annotations

import time
from collections.abc import Set

from cluster.workers.cluster import Cluster

PATIENCE = 60.0
"""Seconds in which a node is tried again on which something still runs. What the run itself has there ends soon."""
PAUSE = 1.0
"""Seconds between two requests."""


class WrongNodes:
    """Drains nodes that compute wrongly, as soon as nothing runs there: other work is not disturbed.

    Attributes:
        known: the addresses of all nodes that were passed to `drain`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.reported: Set[str] = frozenset()
        self._waiting: dict[str, float] = {}
        """Until when to try, in monotonic seconds, by node."""
        self._asked_at = 0.0

    def drain(self, addresses: Set[str]) -> list[str]:
        """Try to drain these nodes, and return a line for each that is drained now or will not be.

        Call it again and again. The last call for a node is up to PATIENCE seconds after the first.
        """
        new = addresses - self.reported
        self.reported |= new
        now = time.monotonic()
        self._waiting |= dict.fromkeys(new, now + PATIENCE)
        if not self._waiting or (not new and now - self._asked_at < PAUSE):
            return []
        self._asked_at = now
        lines = []
        for node, until in list(self._waiting.items()):
            answer = self._cluster.drain(node)
            if not answer.is_final and now < until:
                continue
            del self._waiting[node]
            if answer.refusal:
                why = f"is not drained, because {answer.refusal}; take it out of the cluster yourself"
            else:
                why = "is drained: Ray starts nothing more there, and ends the node"
            lines.append(f"{node}, which computes wrongly, {why}")
        return lines

"""Who keeps snapshots in memory, so that trainers are disposable: one on every node, where it helps and fits."""

from __future__ import annotations

import secrets
from collections.abc import Set

from cluster.workers.cluster import Cluster
from orchestrator.checkpoint.snapshot_server import LIMIT
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.host_memory import state_bytes
from orchestrator.train.task import SNAPSHOT_SERVER

HELD = 2 + 1
"""Snapshots that are held at a time: two generations, and the one that arrives."""


class SnapshotServers:
    """The holders of one run. `token` is what they are known by."""

    def __init__(self, spec: JobSpec, cluster: Cluster) -> None:
        self._spec, self._every = spec, spec.checkpoint.snapshot_every
        self.token = secrets.token_hex(16)
        self._services = cluster.services(SNAPSHOT_SERVER, self.token) if self._every else None

    def places(self, shape: ModelShape, lost: Set[str] = frozenset()) -> list[dict[str, str]]:
        """{"node", "address"} of each. Where the job leaves it open, none on a single node, whose loss takes all
        along, and none where they would not have the memory. Not those on nodes that are `lost`, though Ray may not
        know it yet."""
        if self._services is None:
            return []
        open_ = self._every == "auto"
        found = [
            p for p in self._services.ensure_running(min_nodes=2 if open_ else 1) if p["node"] not in lost
        ]
        fits = HELD * state_bytes(self._spec, shape) <= LIMIT * len(found)
        return found if fits or not open_ else []

    def stop(self) -> None:
        """End them."""
        if self._services is not None:
            self._services.stop()

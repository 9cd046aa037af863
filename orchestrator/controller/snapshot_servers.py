"""The servers that keep snapshots of a run in the memory of its nodes."""

from __future__ import annotations

import secrets
from collections.abc import Set

from cluster.workers.cluster import Cluster
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.snapshot_server import LIMIT
from orchestrator.optim.config import OptimizerSpec
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.host_memory import SERVER_COPIES, state_bytes
from orchestrator.train.task import SNAPSHOT_SERVER


class SnapshotServers:
    """The snapshot servers of one run, one on each node. Clients authenticate with `token`."""

    def __init__(
        self, checkpoint: CheckpointSpec, optimizer: OptimizerSpec, cluster: Cluster, pruned: float = 0.0
    ) -> None:
        """`pruned` is as in `state_bytes`."""
        self._pruned = pruned
        self._every = checkpoint.snapshot_every
        self._ema = checkpoint.ema
        self._optimizer = optimizer
        self.token = secrets.token_hex(16)
        self._services = cluster.services(SNAPSHOT_SERVER, self.token) if self._every else None
        self._in_use = False
        """Whether ranks have had servers, which may hold the newest state of the run."""

    def ensure_running(self, shape: ModelShape, lost: Set[str] = frozenset()) -> list[dict[str, str]]:
        """Start missing servers, and return {"node", "address"} of each.

        With `snapshot_every: auto` the result is empty on a single node, whose loss would take the snapshots along, and
        on nodes without enough memory. But servers that ranks have had stay: when a lost node leaves a single one, the
        step to restore may be in its memory alone.

        Args:
            shape: the model, which says how large a snapshot is.
            lost: addresses of nodes to leave out, because they do not answer; Ray may not know that yet.
        """
        if self._services is None:
            return []
        may_do_without = self._every == "auto" and not self._in_use
        servers = self._services.ensure_running(min_nodes=2 if may_do_without else 1)
        servers = [server for server in servers if server["node"] not in lost]
        state = state_bytes(self._optimizer, self._ema, shape, pruned=self._pruned)
        fits = SERVER_COPIES * state <= LIMIT * len(servers)
        if may_do_without and not fits:
            return []
        self._in_use |= bool(servers)
        return servers

    def leave(self, addresses: Set[str]) -> None:
        """Stop the servers on these nodes, and never start any there again."""
        if self._services is not None:
            self._services.leave(addresses)

    def stop(self) -> None:
        """Stop the servers."""
        if self._services is not None:
            self._services.stop()

"""Changes in the number of rollout workers, for the events of a run, which count their cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from typing import Any

from cluster.workers.clock import wall
from orchestrator.config.errors import InputError
from orchestrator.controller.config import LimitSpec
from orchestrator.planner import prices


class RolloutChanges:
    """Notes when rollout workers came or went, and what their machines cost."""

    def __init__(self, limits: LimitSpec, machines: Callable[[Sequence[str]], list[dict[str, str]]]) -> None:
        """Start without rollout workers.

        Args:
            limits: the limits of the job, with its prices.
            machines: returns type, market and zone of the machines at these addresses.
        """
        self._limits = limits
        self._machines = machines
        self._now: dict[str, Any] = {"workers": 0, "machines": [], "usd_per_hour": None}
        self._rank_nodes: Set[str] = frozenset()
        """Nodes of the last gang, whose cost is that of the gang."""
        self._extra_nodes: Set[str] = frozenset()
        """Nodes with rollout workers and without ranks."""
        self._changes: list[dict[str, Any]] = []

    @property
    def are_waiting(self) -> bool:
        """Whether an event is to tell of a change."""
        return bool(self._changes)

    def see(self, nodes: Sequence[str], rank_nodes: Set[str]) -> None:
        """Note the node of each rollout worker, and the nodes of the ranks."""
        self._rank_nodes = rank_nodes or self._rank_nodes
        extra_nodes = frozenset(nodes) - self._rank_nodes
        if (len(nodes), extra_nodes) == (self._now["workers"], self._extra_nodes):
            return
        self._extra_nodes = extra_nodes
        machines: list[dict[str, str]] = []
        usd = None
        if extra_nodes and self._limits.prices and not self._limits.usd_per_worker_hour:
            machines = self._machines(sorted(extra_nodes))
            with contextlib.suppress(InputError):  # the event of the gang's machines tells the problem
                usd = prices.rate(machines, prices.load(self._limits.prices))
        self._now = {"workers": len(nodes), "machines": machines, "usd_per_hour": usd}
        self._changes.append({"time": wall(), **self._now})

    def take(self, is_start: bool) -> list[dict[str, Any]]:
        """Return the changes since the last call. At the start of an attempt, also what holds now.

        So the cost of an attempt follows from its own events.
        """
        changes = self._changes
        self._changes = []
        if is_start and self._now["workers"]:
            changes = [*changes, {"time": wall(), **self._now}]
        return changes

"""Where the ranks of a Ray gang run: a placement group with an actor in each bundle, which has a fork server of its own
and starts the rank of one attempt after another."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.workers import nodes, shared_imports
from cluster.workers.fork_server import ForkServer
from cluster.workers.gang import Bundle, Cause
from cluster.workers.rank_output import FLUSH_TIMEOUT, TRACE, OutputTarget, RankOutput, log_of
from cluster.workers.rank_process import FENCE_TIMEOUT

CONNECT_INTERVAL = 5.0
"""Seconds between attempts to connect to the head, and the timeout of each."""

ANSWER_TIMEOUT = 1.0
"""Seconds for a worker's actor, or a node's raylet, to answer what takes it milliseconds."""


def wait_until_unreachable(
    address: str, timeout: float = FENCE_TIMEOUT, interval: float = CONNECT_INTERVAL
) -> None:
    """Return once nobody at `address` ("host:port") has accepted a connection for `timeout` seconds."""
    host, _, port = address.rpartition(":")
    last_reached = time.monotonic()
    while True:
        try:
            socket.create_connection((host, int(port)), interval).close()
            last_reached = time.monotonic()
        except OSError:  # only then, for this process may itself have been frozen meanwhile
            if time.monotonic() - last_reached > timeout:
                return
        time.sleep(interval)


class WorkerHost:
    """The actor in a bundle. It starts ranks by a fork server and reports how they end; it imports nothing heavy."""

    def __init__(self, target: str, stands_by: bool = False, shared: str = "") -> None:
        """`stands_by`: see `ForkServer`. `shared` names the process of the node from which its fork server begins."""
        connection, self._shared_imports = None, None
        if shared and shared_imports.is_supported():
            connection, self._shared_imports = shared_imports.connect(shared, target)
        self._fork_server = ForkServer(target, stands_by, connection=connection)
        self._output: RankOutput | None = None
        self._pid = 0
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._exit_when_cut_off, args=(head,), name="fence", daemon=True).start()

    def _exit_when_cut_off(self, head: str) -> None:
        """End with the connection to the head: Ray would keep this actor for some minutes, and no gang could use it."""
        wait_until_unreachable(head)
        os._exit(1)

    def location(self) -> tuple[str, str]:
        """The id and the address of its node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def launch(self, rank: dict[str, Any], output: OutputTarget | None) -> int:
        """End the rank before, and fork the next, whose output is kept there; returns its process id."""
        self.end_ranks()
        self._output = RankOutput(log_of(rank["rank_info"]["rank"]), output)
        self._pid = self._fork_server.launch(**rank, output=self._output.path)
        return self._pid

    def end_ranks(self) -> None:
        """Kill the rank. Raises OSError if the fork server is gone; the rank ended with it."""
        try:
            self._fork_server.end_ranks()
        finally:
            if self._output is not None:
                self._output.close()

    def output(self) -> str:
        """The last of what the rank printed."""
        return self._output.tail() if self._output is not None else ""

    def print_stacks(self) -> None:
        """Have the rank print the Python stacks of its threads."""
        if self._pid and self._pid not in self.exits():
            os.kill(self._pid, TRACE)

    def finish_output(self) -> None:
        """Wait until all is copied that a rank which has ended printed, for some seconds at most."""
        if self._output is not None:
            self._output.join(FLUSH_TIMEOUT)

    def exits(self) -> dict[int, int]:
        """See `ForkServer.exits`."""
        return self._fork_server.exits()

    def cause(self, pid: int) -> Cause | None:
        """How the rank of that process id ended, None while it runs; "lost" if the fork server is gone too."""
        try:
            return self._fork_server.cause(pid)
        except OSError:
            return Cause("lost", name="fork server")


@dataclass(frozen=True, eq=False)
class WorkerGroup:
    """A placement group that is granted, with an actor (`WorkerHost`) in each of its bundles. `locations` are the
    (node id, address) of each actor."""

    group: PlacementGroup
    bundle: Bundle
    target: str
    hosts: tuple[Any, ...]
    locations: tuple[tuple[str, str], ...]

    @property
    def spec(self) -> tuple[int, Bundle, str]:
        """The number of ranks, the size of each, and the entry point whose module is imported there."""
        return len(self.hosts), self.bundle, self.target

    def release(self) -> None:
        """Kill its actors and free their resources."""
        release(self.group, self.hosts)


class UnresponsiveGroup:
    """A worker group that was asked to end its ranks and has not answered yet."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group, self.since = worker_group, time.monotonic()
        self.answers: list[Any] = [host.end_ranks.remote() for host in worker_group.hosts]

    @property
    def nodes(self) -> set[str]:
        """The ids of its nodes."""
        return {node for node, _ in self.worker_group.locations}

    def is_awaited(self) -> bool:
        """Whether an actor has neither answered nor is gone."""
        try:
            return not self.has_answered()
        except RayError:
            return False

    def has_answered(self) -> bool:
        """Whether all its actors have answered. Raises RayError if one of them is gone."""
        missing = ray.wait(self.answers, num_returns=len(self.answers), timeout=0)[1]
        if not missing:
            ray.get(self.answers)
        return not missing


def wait_for_ends(stopping: Sequence[UnresponsiveGroup], seconds: float) -> None:
    """Wait that long for the ranks to be gone, but for ANSWER_TIMEOUT only on nodes that do not answer."""
    end, waiting = time.monotonic() + seconds, list(stopping)
    while waiting:
        answers = [answer for group in waiting for answer in group.answers]
        ray.wait(answers, num_returns=len(answers), timeout=ANSWER_TIMEOUT)
        waiting = [group for group in waiting if group.is_awaited()]
        if not waiting or time.monotonic() >= end:
            return
        away = nodes.unreachable({node for group in waiting for node in group.nodes}, ANSWER_TIMEOUT)
        waiting = [group for group in waiting if not away & group.nodes]


class PendingGroup:
    """A worker group that is being made: its placement group is granted, its actors start, their imports end.

    The placement group packs `ranks` bundles onto one node where one is large enough, and leaves out the nodes in
    `avoid` (ids or addresses). `shared`: see `WorkerHost`.
    """

    def __init__(self, ranks: int, bundle: Bundle, target: str, avoid: Set[str], shared: str = "") -> None:
        alive = nodes.alive()
        fits_one_node = any(nodes.fitting_workers(n.total, n.labels, bundle) >= ranks for n in alive)
        avoided = sorted(n.id for n in alive if n.id in avoid or n.address in avoid)
        labels = dict(bundle.labels) | ({"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else {})
        self.group = placement_group(
            [bundle.resources] * ranks,
            strategy="STRICT_PACK" if fits_one_node else "PACK",
            bundle_label_selector=[labels] * ranks if labels else None,
        )
        self._ranks, self.bundle, self._target, self._shared = ranks, bundle, target, shared
        self._ready: Any = self.group.ready()
        self._hosts: list[Any] = []
        self._answers: list[Any] = []

    def advance(self, wait: float) -> WorkerGroup | None:
        """The worker group if it is complete within `wait` seconds or so, else None. Raises RayError if one of its
        actors dies."""
        if not self._hosts and self._is_granted(wait):
            remote: Any = ray.remote(WorkerHost)
            for number in range(self._ranks):
                strategy = PlacementGroupSchedulingStrategy(self.group, number)
                worker = remote.options(
                    num_cpus=self.bundle.cpu, num_gpus=self.bundle.gpu, scheduling_strategy=strategy
                )
                self._hosts.append(worker.remote(self._target, self.bundle.stands_by, self._shared))
            self._answers = [h.location.remote() for h in self._hosts] + [
                h.exits.remote() for h in self._hosts
            ]
        if not self._hosts or ray.wait(self._answers, num_returns=len(self._answers), timeout=wait)[1]:
            return None
        locations = [tuple(location) for location in ray.get(self._answers[: self._ranks])]
        return WorkerGroup(self.group, self.bundle, self._target, tuple(self._hosts), tuple(locations))

    def release(self) -> None:
        """Kill the actors that have started and free what is reserved."""
        release(self.group, self._hosts)

    def _is_granted(self, wait: float) -> bool:
        return bool(ray.wait([self._ready], timeout=wait)[0])

    @property
    def granted(self) -> int:
        """The number of ranks whose resources it occupies already; 0 until its placement group is granted."""
        return len(self._hosts)


def release(group: PlacementGroup, hosts: Iterable[Any]) -> None:
    """Kill the actors and remove the placement group."""
    for host in hosts:
        with contextlib.suppress(RayError):
            ray.kill(host)
    with contextlib.suppress(RayError):
        remove_placement_group(group)


def first_line(error: RayError) -> str:
    """The line of Ray's message that says why an actor is gone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = (line for line in lines if "cause" in line.lower() or "killed" in line.lower())
    return next(relevant, lines[0] if lines else type(error).__name__)[:300]

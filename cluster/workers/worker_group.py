"""Worker groups: where the ranks of a Ray gang run.

A worker group is a placement group with one actor in each bundle. Usually it is one bundle for all ranks for which a
node has room, so a node has one actor (`group_sizes`). Ranks that should share a node although no node is large enough
are spread, with a bundle for each. An actor has a fork server for each of its ranks, with which it starts the rank of
one attempt after another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.workers import nodes, shared_imports
from cluster.workers.fork_server import ForkServer, end_ranks
from cluster.workers.gang import Bundle, Cause
from cluster.workers.rank_output import FLUSH_TIMEOUT, TRACE, OutputTarget, RankOutput, log_of
from cluster.workers.rank_process import FENCE_TIMEOUT
from cluster.workers.shared_imports import SharedImports

CONNECT_INTERVAL = 5.0
"""Seconds between attempts to connect to the head, and the timeout of each."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable in which Ray names the GPUs of an actor."""
THREADS = "OMP_NUM_THREADS"
"""The environment variable in which Ray gives an actor as many threads as it has CPUs, unless it is set already."""
ANSWER_TIMEOUT = 1.0
"""Seconds to wait for an answer of a worker's actor or of a node's raylet, which takes milliseconds normally."""


def wait_until_unreachable(
    address: str, timeout: float = FENCE_TIMEOUT, interval: float = CONNECT_INTERVAL
) -> None:
    """Return once nobody at `address` ("host:port") has accepted a connection for `timeout` seconds.

    Args:
        address: "host:port".
        timeout: seconds without an accepted connection.
        interval: seconds between two attempts, and for each.
    """
    host, _, port = address.rpartition(":")
    last_reached = time.monotonic()
    while True:
        try:
            socket.create_connection((host, int(port)), interval).close()
            last_reached = time.monotonic()
        except OSError:  # checked only after a failed try, because this process may itself have been frozen
            if time.monotonic() - last_reached > timeout:
                return
        time.sleep(interval)


class _Slot:
    """One rank's place in a `WorkerHost`: its fork server, and the rank of the present attempt."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.fork_server = fork_server
        self.output: RankOutput | None = None
        self.pid = 0

    def launch(self, rank: dict[str, Any], config: dict[str, Any], output: OutputTarget | None) -> int:
        """Fork the rank, see `WorkerHost.launch`, and return its process id."""
        self.output = RankOutput(log_of(rank["rank_info"]["rank"]), output)
        self.pid = self.fork_server.launch(**rank, config=config, output=self.output.path)
        return self.pid


class WorkerHost:
    """The actor in a bundle. It starts ranks by fork servers and reports how they end; it imports nothing heavy."""

    def __init__(self, target: str, ranks: int = 1, stands_by: bool = False, shared: str = "") -> None:
        """Start the fork servers.

        Args:
            target: the entry point whose module is imported.
            ranks: how many ranks run here at a time. Each gets its share of the GPUs that this actor has.
            stands_by: see `ForkServer`.
            shared: the name of the node's process from which fork servers are forked, empty for fresh ones.
        """
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
        if threads := os.environ.get(THREADS):
            os.environ[THREADS] = threads_of_rank(threads, cpus, ranks)
        self._shared_imports: list[SharedImports | None] = []
        self._slots: list[_Slot] = []
        for gpus in shares(os.environ.get(VISIBLE, ""), ranks):
            if gpus:
                os.environ[VISIBLE] = gpus  # inherited by the fork server, its standby and its ranks
            connection = None
            if shared and shared_imports.is_supported():
                connection, started = shared_imports.connect(shared, target)
                self._shared_imports.append(started)
            self._slots.append(_Slot(ForkServer(target, stands_by, connection=connection)))
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._exit_when_cut_off, args=(head,), name="fence", daemon=True).start()

    def _exit_when_cut_off(self, head: str) -> None:
        """Exit when the head is unreachable. Ray would keep this actor for minutes, although no gang could use it."""
        wait_until_unreachable(head)
        os._exit(1)

    def location(self) -> tuple[str, str]:
        """Return the id and the address of its node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def launch(
        self, ranks: Sequence[dict[str, Any]], config: dict[str, Any], output: OutputTarget | None
    ) -> list[int]:
        """Kill the previous ranks, fork the next ones at the same time, and return their process ids.

        Args:
            ranks: for each rank, the arguments of `rank_process.run` that only it has.
            config: the configuration of all ranks, which Ray brings to each node once.
            output: see `RankOutput`.
        """
        self.end_ranks()
        with ThreadPoolExecutor(len(ranks), "launch") as pool:
            launches = [
                pool.submit(slot.launch, rank, config, output)
                for slot, rank in zip(self._slots, ranks, strict=True)
            ]
        return [launch.result() for launch in launches]

    def end_ranks(self) -> None:
        """Kill the ranks. Raises OSError if a fork server is gone; its rank ended with it."""
        try:
            end_ranks([slot.fork_server for slot in self._slots])
        finally:
            for slot in self._slots:
                if slot.output is not None:
                    slot.output.close()

    def output(self, index: int) -> str:
        """Return the last output of a rank."""
        output = self._slots[index].output
        return output.tail() if output is not None else ""

    def print_stacks(self) -> None:
        """Make the ranks print the Python stacks of their threads."""
        for slot in self._slots:
            with contextlib.suppress(OSError):  # its fork server is gone
                if slot.pid and slot.pid not in slot.fork_server.exits():
                    os.kill(slot.pid, TRACE)

    def finish_output(self) -> None:
        """Wait up to FLUSH_TIMEOUT until all output of ranks that have ended is copied."""
        end = time.monotonic() + FLUSH_TIMEOUT
        for slot in self._slots:
            if slot.output is not None:
                slot.output.join(max(end - time.monotonic(), 0.0))

    def exits(self) -> dict[int, int]:
        """See `ForkServer.exits`. Waits for the imports of all fork servers."""
        return {pid: code for slot in self._slots for pid, code in slot.fork_server.exits().items()}

    def cause(self, index: int, pid: int) -> Cause | None:
        """Return how the rank with that process id ended, None while it runs; "lost" if its fork server is gone too.

        Args:
            index: of the rank here.
            pid: its process id.
        """
        try:
            return self._slots[index].fork_server.cause(pid)
        except OSError:
            return Cause("lost", name="fork server")


def threads_of_rank(threads: str, cpus: float, ranks: int) -> str:
    """Return the OMP_NUM_THREADS of each rank: its share of the CPUs if the actor's is Ray's own, else the actor's.

    Args:
        threads: OMP_NUM_THREADS of the actor.
        cpus: of the actor.
        ranks: number of ranks.
    """
    return str(max(int(cpus / ranks), 1)) if threads == str(int(cpus)) else threads


def shares(gpus: str, ranks: int) -> list[str]:
    """Return each rank's part of these GPUs, named as in CUDA_VISIBLE_DEVICES; empty parts if there are too few.

    Args:
        gpus: as in CUDA_VISIBLE_DEVICES.
        ranks: number of ranks.
    """
    names = gpus.split(",")
    each = len(names) // ranks
    return [",".join(names[each * rank : each * (rank + 1)]) for rank in range(ranks)]


def group_sizes(workers: int, room: Iterable[int], together: int) -> list[int]:
    """Return the numbers of ranks of the fewest worker groups for some workers, largest first.

    A group gets what a node has room for. Workers for which no node has room get the smallest groups, which fit
    wherever there is room later.

    Args:
        workers: number of workers, a multiple of `together`.
        room: for how many workers each node has room.
        together: ranks that should share a node. Every size is a multiple of it.
    """
    sizes = []
    for free in sorted(room, reverse=True):
        if size := min(free // together * together, workers):
            sizes.append(size)
            workers -= size
    return sizes + [together] * (workers // together)


class WorkerSpec(NamedTuple):
    """The kind of worker that an attempt needs. Worker groups of an equal spec can be used again."""

    bundle: Bundle
    """The resources that one rank occupies."""
    target: str
    """The entry point, "module:function", whose module the workers import."""


@dataclass(frozen=True, eq=False)
class WorkerGroup:
    """A placement group that Ray has granted, with an actor in each of its bundles."""

    group: PlacementGroup
    spec: WorkerSpec
    hosts: tuple[Any, ...]
    """The handles of the actors (`WorkerHost`): one, or one for each rank."""
    locations: tuple[tuple[str, str], ...]
    """The (node id, address) of each rank."""

    @property
    def ranks(self) -> int:
        """The number of its ranks."""
        return len(self.locations)

    @property
    def has_one_actor(self) -> bool:
        """Whether all of its ranks are in one actor, and so on one node."""
        return len(self.hosts) == 1

    def host_of(self, index: int) -> tuple[Any, int]:
        """Return the actor of the rank at an index of the group, and the rank's index in that actor."""
        each = self.ranks // len(self.hosts)
        return self.hosts[index // each], index % each

    def release(self) -> None:
        """Kill the actors and free their resources."""
        release(self.group, self.hosts)


class UnresponsiveGroup:
    """A worker group that was asked to kill its ranks and has not answered yet. `since` is when it was asked."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group = worker_group
        self.since = time.monotonic()
        self.answers: list[Any] = [host.end_ranks.remote() for host in worker_group.hosts]

    @property
    def nodes(self) -> set[str]:
        """The ids of its nodes."""
        return {node for node, _ in self.worker_group.locations}

    def is_awaited(self) -> bool:
        """Whether an actor may still answer: all are alive, and one has not answered."""
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
    """Wait up to `seconds` until the ranks are gone, but only ANSWER_TIMEOUT for nodes that do not answer.

    Args:
        stopping: groups that were asked to kill their ranks.
        seconds: to wait at most.
    """
    end = time.monotonic() + seconds
    waiting = list(stopping)
    while waiting:
        answers = [answer for group in waiting for answer in group.answers]
        ray.wait(answers, num_returns=len(answers), timeout=ANSWER_TIMEOUT)
        waiting = [group for group in waiting if group.is_awaited()]
        if not waiting or time.monotonic() >= end:
            return
        unreachable = nodes.unreachable({node for group in waiting for node in group.nodes}, ANSWER_TIMEOUT)
        waiting = [group for group in waiting if not unreachable & group.nodes]


class PendingGroup:
    """A worker group in the making: Ray grants its placement group, its actors start, and their imports end."""

    def __init__(
        self, spec: WorkerSpec, ranks: int, avoid: Set[str], alive: Sequence[nodes.Node], shared: str = ""
    ) -> None:
        """Request the placement group, packed onto one node if any is large enough.

        Args:
            spec: the kind of its workers.
            ranks: the number of its workers.
            avoid: ids or addresses of nodes to leave out.
            alive: the alive nodes.
            shared: see `WorkerHost`.
        """
        bundle = spec.bundle
        fits_one_node = any(nodes.fitting_workers(n.total, n.labels, bundle) >= ranks for n in alive)
        avoided = sorted(n.id for n in alive if n.id in avoid or n.address in avoid)
        labels = dict(bundle.labels)
        if avoided:
            labels["ray.io/node-id"] = f"!in({','.join(avoided)})"
        self._shares = [ranks] if fits_one_node else [1] * ranks
        """The number of ranks of each actor."""
        self.group = placement_group(
            [{key: share * value for key, value in bundle.resources.items()} for share in self._shares],
            strategy="STRICT_PACK" if fits_one_node else "PACK",
            bundle_label_selector=[labels] * len(self._shares) if labels else None,
        )
        self.spec = spec
        self.ranks = ranks
        self.since = time.monotonic()
        """When it was requested."""
        self._shared = shared
        self._ready: Any = self.group.ready()
        self._hosts: list[Any] = []
        self._answers: list[Any] = []

    @property
    def awaited(self) -> list[Any]:
        """What it waits for next: the placement group, then the answers of its actors."""
        return self._answers or [self._ready]

    def advance(self) -> WorkerGroup | None:
        """Return the worker group if it is complete, else None. Starts the actors once the placement group is granted.

        Raises:
            RayError: one of its actors has died.
        """
        if not self._hosts and ray.wait([self._ready], timeout=0)[0]:
            remote: Any = ray.remote(WorkerHost)
            bundle = self.spec.bundle
            for number, share in enumerate(self._shares):
                strategy = PlacementGroupSchedulingStrategy(self.group, number)
                worker = remote.options(
                    num_cpus=share * bundle.cpu, num_gpus=share * bundle.gpu, scheduling_strategy=strategy
                )
                self._hosts.append(worker.remote(self.spec.target, share, bundle.stands_by, self._shared))
            self._answers = [host.location.remote() for host in self._hosts]
            # `exits` answers only when the imports are done.
            self._answers += [host.exits.remote() for host in self._hosts]
        if not self._hosts or ray.wait(self._answers, num_returns=len(self._answers), timeout=0)[1]:
            return None
        located = zip(ray.get(self._answers[: len(self._hosts)]), self._shares, strict=True)
        locations = tuple(tuple(location) for location, share in located for _ in range(share))
        return WorkerGroup(self.group, self.spec, hosts=tuple(self._hosts), locations=locations)

    def late_nodes(self) -> Set[str]:
        """Return the addresses of the nodes whose actors have not started or not imported everything."""
        addresses = {node.id: node.address for node in nodes.alive()}
        places = placement_group_table(self.group)["bundles_to_node_id"]
        ready = (
            set(ray.wait(self._answers, num_returns=len(self._answers), timeout=0)[0])
            if self._answers
            else set()
        )
        hosts = len(self._shares)
        late = [n for n in range(hosts) if not ready.issuperset(self._answers[n::hosts])]
        return {addresses.get(places.get(n, ""), "a node that is gone") for n in late}

    def release(self) -> None:
        """Kill the actors that have started, and free the placement group."""
        release(self.group, self._hosts)

    @property
    def granted(self) -> int:
        """The number of ranks whose resources it occupies; 0 until Ray grants its placement group."""
        return self.ranks if self._hosts else 0

    @property
    def has_one_actor(self) -> bool:
        """See `WorkerGroup`."""
        return len(self._shares) == 1


def release(group: PlacementGroup, hosts: Iterable[Any]) -> None:
    """Kill the actors and remove the placement group.

    Args:
        group: the placement group.
        hosts: handles of the actors.
    """
    for host in hosts:
        with contextlib.suppress(RayError):
            ray.kill(host)
    with contextlib.suppress(RayError):
        remove_placement_group(group)


def first_line(error: RayError) -> str:
    """Return the line of Ray's message that says why an actor is gone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = (line for line in lines if "cause" in line.lower() or "killed" in line.lower())
    return next(relevant, lines[0] if lines else type(error).__name__)[:300]

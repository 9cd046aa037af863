"""A gang of Ray actors. Ranks that should share a node form a worker group, which is one placement group."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence, Set
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError

from cluster.workers import nodes
from cluster.workers.fork_server import START_TIMEOUT
from cluster.workers.gang import Bundle, Cause, End, GangStatus, RankStatus, workers_text
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.rank_output import FLUSH_TIMEOUT, OutputTarget
from cluster.workers.worker_context import RankInfo
from cluster.workers.worker_group import (
    ANSWER_TIMEOUT,
    GroupSpec,
    PendingGroup,
    UnresponsiveGroup,
    WorkerGroup,
    first_line,
    wait_for_ends,
)

PLACEMENT_TIMEOUT = 30.0
"""Seconds to wait until Ray grants placement groups for which there is room."""
END_FACTOR = 2.0
"""Ranks may take this many times the slowest end that was seen, if that is longer than `DeviceLimits.end`."""
SUSPECT_SECONDS = 60.0
"""Seconds for which a node that did not answer gets no ranks, unless it answers or Ray declares it dead first."""
SUSPECT_ANSWER_TIMEOUT = 0.05
"""Seconds to wait for an actor's answer on a node that is suspected already."""
LAUNCH_TIMEOUT = 20.0
"""Seconds to wait until a prewarmed worker has started a rank, which takes milliseconds normally."""
OUTPUT_TIMEOUT = 0.2
"""Seconds to wait for the output of a rank. Short, because a recovery waits for it."""
NAMED = 8
"""How many nodes a message names; it counts the rest."""
NODE_CHECK_INTERVAL = 1.0
"""Seconds between two checks for nodes that are being drained."""


class RayGang:
    """`Gang` on Ray. Ranks are numbered group by group, and groups by the address of their node.

    Worker groups stay between attempts. Groups that `prewarm` requests beyond those in use are created while the
    ranks run. All of them belong to the process that made this object: if it dies, Ray and the kernel end the rest.
    """

    def __init__(self, shared: str = "") -> None:
        """`shared` names the process of each node that has the imports of ranks done, see `shared_imports`."""
        self._shared = shared
        self._heartbeats = HeartbeatServer(ray.util.get_node_ip_address())
        self._group_spec = GroupSpec(ranks=1, bundle=Bundle(), target="")
        """The kind of worker groups that the present attempt uses."""
        self._target_workers = 0
        """How many workers to keep ready, those of running ranks included."""
        self._avoid: frozenset[str] = frozenset()
        """Addresses of nodes that get no ranks."""
        self._groups: list[WorkerGroup] = []
        """Worker groups that are ready."""
        self._pending: list[PendingGroup] = []
        """Worker groups in the making."""
        self._unresponsive: list[UnresponsiveGroup] = []
        """Worker groups that did not answer the last stop in time."""
        self._slots: list[tuple[WorkerGroup, int]] = []
        """Where each rank of the present attempt runs: its worker group, and its index in that group."""
        self._suspected: dict[str, float] = {}
        """Nodes that did not answer, by id, with the monotonic time at which that was noticed."""
        self._addresses: dict[str, str] = {}
        """The addresses of nodes that were ever suspected, by id."""
        self._nodes_checked_at = 0.0
        """The monotonic time of the last check for nodes that are being drained."""
        self._slowest_end = 0.0
        """The longest time, in seconds, that ranks took to end on nodes that answered meanwhile."""

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`."""
        self._reclaim_responsive()
        self._advance(
            wait=0.0
        )  # pending groups occupy nodes too, and nothing else advances them between attempts
        workers = sum(len(group.locations) for group in self._healthy(avoid) if group.spec.bundle == bundle)
        workers += sum(pending.granted for pending in self._pending if pending.spec.bundle == bundle)
        return workers + nodes.free_workers(bundle, avoid | self._suspected_nodes())

    def start(
        self,
        world_size: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        ranks_per_group: int = 1,
        avoid: Set[str] = frozenset(),
        output: OutputTarget | None = None,
    ) -> None:
        """See `Gang.start`."""
        spec = GroupSpec(ranks_per_group, bundle, target)
        if spec != self._group_spec:
            for pending in self._pending:
                pending.release()
            self._pending = []
        self._group_spec = spec
        self._avoid = frozenset(avoid)
        self._target_workers = world_size
        healthy = self._healthy(avoid)
        for group in list(self._groups):
            if group.spec != spec or group not in healthy:
                self._release(group)
        needed = world_size // ranks_per_group
        self._request_groups(needed)
        self._wait_for_groups(needed)
        self._groups.sort(key=lambda group: group.locations[0][::-1])  # by address, then by node id
        chosen = self._groups[:needed]
        self._slots = [(group, index) for group in chosen for index in range(ranks_per_group)]
        self._launch(target, config, output)

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """See `Gang.prewarm`."""
        self._target_workers = count
        if bundle is not None:
            self._group_spec = GroupSpec(ranks=1, bundle=bundle, target=target)
            self._avoid = frozenset(avoid)
            present = len(self._groups) + len(self._pending)
            free = nodes.free_workers(bundle, self._avoid | self._suspected_nodes())
            self._request_groups(min(count, present + free))
            self._advance(wait=0.1)  # starts their imports, which go on while the caller does something else
        self._release_surplus()

    def occupied_workers(self) -> int:
        """See `Gang.occupied_workers`."""
        self._advance(wait=0.0)
        return self.ready() + sum(pending.granted for pending in self._pending)

    def ready(self) -> int:
        """See `Gang.ready`."""
        return sum(len(group.locations) for group in self._groups)

    def lost_nodes(self) -> Set[str]:
        """See `Gang.lost_nodes`."""
        return {address for node, address in self._addresses.items() if node in self._suspected_nodes()}

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        if time.monotonic() - self._nodes_checked_at > NODE_CHECK_INTERVAL:
            self._nodes_checked_at = time.monotonic()
            self._check_nodes()
        return self._heartbeats.poll(saved, wait, self._cause)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        self._heartbeats.broadcast({"stop": True})

    def ask_profile(self, request: dict[str, Any]) -> None:
        """See `Gang.ask_profile`."""
        self._heartbeats.broadcast({"profile": request})

    def output(self, rank: int) -> str:
        """See `Gang.output`."""
        if rank >= len(self._slots):
            return ""
        group, index = self._slots[rank]
        host, index_in_host = group.host_of(index)
        try:
            return str(ray.get(host.output.remote(index_in_host), timeout=OUTPUT_TIMEOUT))
        except RayError:
            return ""

    def print_stacks(self) -> None:
        """See `Gang.print_stacks`."""
        self._heartbeats.ask_what_hangs()
        groups = dict.fromkeys(group for group, _ in self._slots)
        answers = [host.print_stacks.remote() for group in groups for host in group.hosts]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=OUTPUT_TIMEOUT)

    def stop(self) -> None:
        """See `Gang.stop`."""
        # Groups without ranks are asked too, because their nodes may also be gone.
        stopping = [UnresponsiveGroup(group) for group in self._groups]
        self._slots = []
        wait_for_ends(stopping, max(self._group_spec.bundle.limits.end, END_FACTOR * self._slowest_end))
        lost = []
        for unresponsive in stopping:
            try:
                if unresponsive.has_answered():
                    continue
                self._unresponsive.append(unresponsive)
                self._groups.remove(unresponsive.worker_group)
            except RayError:
                self._release(unresponsive.worker_group)
            lost.append(unresponsive.worker_group)
        self._suspect_nodes(*lost)

    def close(self) -> None:
        """See `Gang.close`."""
        finished = [host.finish_output.remote() for group in self._groups for host in group.hosts]
        if finished:
            ray.wait(finished, num_returns=len(finished), timeout=FLUSH_TIMEOUT)
        for pending in self._pending:
            pending.release()
        for group in list(self._groups):
            self._release(group)
        for unresponsive in self._unresponsive:
            unresponsive.worker_group.release()
        self._slots = []
        self._pending = []
        self._unresponsive = []
        self._heartbeats.close()

    # -- worker groups

    def _request_groups(self, groups: int) -> None:
        """Request placement groups until `groups` worker groups are ready or pending."""
        missing = groups - len(self._groups) - len(self._pending)
        if missing <= 0:
            return
        avoid = self._avoid | self._suspected_nodes()
        alive = nodes.alive()
        for _ in range(missing):
            self._pending.append(PendingGroup(self._group_spec, avoid, alive, shared=self._shared))

    def _release_surplus(self) -> None:
        """Release the worker groups beyond those to keep ready, for others need their room. Ranks keep theirs."""
        surplus = len(self._groups) + len(self._pending) - self._target_workers // self._group_spec.ranks
        unused = [group for group in self._groups if all(group is not used for used, _ in self._slots)]
        for _ in range(surplus):
            if self._pending:
                self._pending.pop().release()
            elif unused:
                self._release(unused.pop())

    def _wait_for_groups(self, groups: int) -> None:
        """Wait until `groups` worker groups are ready.

        Raises:
            TimeoutError: that takes too long. The pending groups are released then.
        """
        started = time.monotonic()
        while len(self._groups) < groups:
            self._reclaim_responsive()
            self._advance(wait=0.05)
            waited = time.monotonic() - started
            waiting = [pending for pending in self._pending if not pending.granted]
            if (waiting and waited > PLACEMENT_TIMEOUT) or waited > PLACEMENT_TIMEOUT + START_TIMEOUT:
                late = self._late_text(waiting)
                for pending in self._pending:
                    pending.release()
                self._pending = []
                problem = "no room for" if waiting else "the processes did not start for"
                missing = groups - len(self._groups)
                text = f"{problem} {missing} of {groups} groups of {workers_text(self._group_spec.ranks)}"
                raise TimeoutError(f"{text} with {self._group_spec.bundle} within {waited:.0f} s{late}")
            if not self._pending:
                self._request_groups(groups)

    def _late_text(self, waiting: Sequence[PendingGroup]) -> str:
        """Return which nodes `_wait_for_groups` waits for: with too little room, or whose processes did not start."""
        if waiting:
            avoided = self._avoid | self._suspected_nodes()
            free = nodes.free_by_node(self._group_spec.bundle, avoided)
            places = [f"{workers} on {address}" for address, workers in sorted(free)]
            return f"; there is room for {_listed(places) or 'none on any node'}"
        late = sorted({address for pending in self._pending for address in pending.late_nodes()})
        return f" on {_listed(late)}" if late else ""

    def _advance(self, wait: float) -> None:
        """Move pending groups that are complete to the ready ones, and drop those whose actors died.

        Before that, wait up to `wait` seconds for all of them together.
        """
        awaited = [reference for pending in self._pending for reference in pending.awaited]
        if wait and awaited:
            ray.wait(awaited, num_returns=len(awaited), timeout=wait)
        for pending in list(self._pending):
            try:
                if group := pending.advance():
                    self._groups.append(group)
                    self._pending.remove(pending)
            except RayError:
                pending.release()
                self._pending.remove(pending)

    def _check_nodes(self) -> None:
        """Request missing worker groups for which there is room, and mark the ranks whose nodes are being drained."""
        self._reclaim_responsive()
        spec = self._group_spec
        missing = self._target_workers // spec.ranks - len(self._groups) - len(self._pending)
        avoided = self._avoid | self._suspected_nodes()
        if missing > 0:
            room = [workers for _, workers in nodes.free_by_node(spec.bundle, avoided)]
            # A group may also be spread, if no node has room for all of it.
            fitting = max(sum(workers // spec.ranks for workers in room), int(sum(room) >= spec.ranks))
            self._request_groups(len(self._groups) + len(self._pending) + min(missing, fitting))
        self._advance(wait=0.0)
        drained = nodes.draining()
        for number, (group, index) in enumerate(self._slots):
            if group.locations[index][0] in drained:
                self._heartbeats.mark(number, leaving=True)

    def _healthy(self, avoid: Set[str]) -> list[WorkerGroup]:
        """The ready worker groups whose nodes are all alive, and neither draining nor in `avoid`."""
        alive = {node.id for node in nodes.alive()} - self._suspected_nodes() - nodes.draining()
        return [
            group
            for group in self._groups
            if all(node in alive and address not in avoid for node, address in group.locations)
        ]

    def _release(self, group: WorkerGroup) -> None:
        self._groups.remove(group)
        group.release()

    def _discard_lost(self, group: WorkerGroup) -> None:
        if group in self._groups:
            self._suspect_nodes(group)
            self._release(group)

    def _suspect_nodes(self, *groups: WorkerGroup) -> None:
        """Suspect the nodes of these groups that do not answer. An actor may have died without its node."""
        locations = {
            node: address
            for group in groups
            for node, address in group.locations
            if node not in self._suspected
        }
        if locations:
            self._suspected |= dict.fromkeys(nodes.unreachable(locations, ANSWER_TIMEOUT), time.monotonic())
            self._addresses |= locations

    def _reclaim_responsive(self) -> None:
        """Take back usable worker groups that answer late (a cut network was repaired), and release the others.

        A group that has not answered yet is kept until its time is up.
        """
        alive = {node.id for node in nodes.alive()} if self._unresponsive else set()
        for unresponsive in list(self._unresponsive):
            group_nodes = unresponsive.nodes
            suspected = bool(group_nodes & self._suspected_nodes())
            stall = max(unresponsive.worker_group.spec.bundle.limits.stall, END_FACTOR * self._slowest_end)
            timeout = SUSPECT_SECONDS if suspected else stall
            if not group_nodes <= alive:
                timeout = 0.0  # Ray would place the group on another node, where this gang cannot use it
            try:
                answered = unresponsive.has_answered()
                expired = time.monotonic() - unresponsive.since > timeout
            except RayError:
                answered = False
                expired = True
            if not (answered or expired):
                continue
            self._unresponsive.remove(unresponsive)
            if answered and not suspected:
                self._slowest_end = max(self._slowest_end, time.monotonic() - unresponsive.since)
            for node, _ in unresponsive.worker_group.locations if answered else ():
                self._suspected.pop(node, None)
            if not answered or not self._is_usable(unresponsive.worker_group):
                unresponsive.worker_group.release()
                continue
            self._groups.append(unresponsive.worker_group)
            workers = (len(self._groups) + len(self._pending)) * self._group_spec.ranks
            if self._pending and workers > self._target_workers:
                self._pending.pop().release()

    def _is_usable(self, group: WorkerGroup) -> bool:
        """Whether the present attempt can use the group, and needs one more."""
        is_avoided = any(address in self._avoid for _, address in group.locations)
        is_needed = (len(self._groups) + 1) * self._group_spec.ranks <= self._target_workers
        return group.spec == self._group_spec and is_needed and not is_avoided

    def _suspected_nodes(self) -> set[str]:
        """The ids of nodes that were found not to answer within the last SUSPECT_SECONDS."""
        now = time.monotonic()
        self._suspected = {
            node: since for node, since in self._suspected.items() if now - since < SUSPECT_SECONDS
        }
        return set(self._suspected)

    # -- ranks

    def _launch(self, target: str, config: dict[str, Any], output: OutputTarget | None) -> None:
        """Start one rank in each slot. Raises TimeoutError if a worker does not start its rank."""
        locations = [group.locations[index] for group, index in self._slots]
        token = self._heartbeats.expect([address for _, address in locations])
        _, master = locations[0]
        local_ranks: dict[str, int] = {}
        ranks = []
        for number, (node, address) in enumerate(locations):
            local_rank = local_ranks[node] = local_ranks.get(node, -1) + 1
            rank_info = RankInfo(
                rank=number, world_size=len(locations), local_rank=local_rank, host=master, node=address
            )
            ranks.append(
                {
                    "rank_info": dataclasses.asdict(rank_info),
                    "target": target,
                    "server": self._heartbeats.address,
                    "token": token,
                }
            )
        # Once into Ray's object store, from where each node gets it once, instead of with every call.
        shared_config = ray.put(config)
        launches = []
        for first, (group, index) in enumerate(self._slots):
            host, index_in_host = group.host_of(index)
            if not index_in_host:  # the first rank of its actor, which starts all of its ranks
                of_host = ranks[first : first + len(group.locations) // len(group.hosts)]
                launches.append((group, index, host.launch.remote(of_host, shared_config, output)))
        for group, index, reference in launches:
            try:
                ray.get(reference, timeout=LAUNCH_TIMEOUT)
            except RayError as error:
                self._discard_lost(group)
                address = group.locations[index][1]
                raise TimeoutError(f"a worker on {address} did not start: {first_line(error)}") from None

    def _cause(self, rank: RankStatus) -> tuple[Cause, str]:
        """Return why a rank is dead, and a line for people: how its process ended, or that its node does not answer."""
        group, index = self._slots[rank.rank]
        host, index_in_host = group.host_of(index)
        limit = self._group_spec.bundle.limits.end
        # Ranks of a dead node are asked about one by one, and the first one has waited for an answer of the node.
        is_suspected = group.locations[index][0] in self._suspected_nodes()
        answer_timeout = SUSPECT_ANSWER_TIMEOUT if is_suspected else ANSWER_TIMEOUT
        deadline = time.monotonic() + limit
        try:
            while time.monotonic() < deadline:
                if cause := ray.get(host.cause.remote(index_in_host, rank.pid), timeout=answer_timeout):
                    if cause.end == "lost":
                        self._discard_lost(group)
                    return cause, cause.text or "the process that starts ranks has ended"
                time.sleep(0.002)  # a process may take seconds to end after its connection is closed
        except RayError as error:
            self._discard_lost(group)  # at once, so that nothing waits for its answer again
            end: End = "starved" if isinstance(error, OutOfMemoryError) else "lost"
            return Cause(end, name="place"), f"the node or its Ray worker is gone: {first_line(error)}"
        return Cause("lost", name="answer"), f"no answer from {rank.node} within {limit:g} s"


def _listed(names: Sequence[str]) -> str:
    """Return at most NAMED names, and the number of the others."""
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])

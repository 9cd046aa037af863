"""A gang of Ray actors. The ranks on a node form a worker group, which is one placement group with one actor.

A gang takes whole groups from a cluster, gives whole groups back, and starts an attempt on whole groups. If an attempt
needs a part of a group, a smaller group replaces it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

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
    PendingGroup,
    UnresponsiveGroup,
    WorkerGroup,
    WorkerSpec,
    first_line,
    group_sizes,
    wait_for_ends,
)

AnyGroup = WorkerGroup | PendingGroup
Group = TypeVar("Group", bound=AnyGroup)

PLACEMENT_TIMEOUT = 30.0
"""Seconds to wait until Ray grants placement groups for which there is room."""
DIVIDED_AFTER = 1.0
"""Seconds after which a group that is not granted is divided if no node has room for all of it: others were faster."""
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
        self._spec = WorkerSpec(bundle=Bundle(), target="")
        """The kind of workers that the present attempt uses."""
        self._together = 1
        """How many consecutive ranks of the present attempt should share a node."""
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
        workers = sum(group.ranks for group in self._healthy(avoid) if group.spec.bundle == bundle)
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
        self._spec, self._together = WorkerSpec(bundle, target), ranks_per_group
        self._avoid = frozenset(avoid)
        self._target_workers = world_size
        # Pending groups without a grant have cost nothing yet, and there may be room for larger ones now.
        self._release(*(group for group in self._pending if not (group.granted and self._suits(group))))
        healthy = set(self._healthy(avoid))
        unfit = [group for group in self._groups if not (group in healthy and self._suits(group))]
        self._request_rest(world_size, unfit)
        chosen = self._wait_for_workers(world_size)
        chosen.sort(key=_address)
        self._slots = [(group, index) for group in chosen for index in range(group.ranks)]
        self._launch(target, config, output)

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """See `Gang.prewarm`."""
        self._target_workers = count
        if bundle is not None:
            self._spec, self._together = WorkerSpec(bundle, target), 1
            self._avoid = frozenset(avoid)
            self._request_missing()
            self._advance(wait=0.1)  # starts their imports, which go on while the caller does something else
        self._release_surplus()

    def occupied_workers(self) -> int:
        """See `Gang.occupied_workers`."""
        self._advance(wait=0.0)
        return self.ready() + sum(pending.granted for pending in self._pending)

    def ready(self) -> int:
        """See `Gang.ready`."""
        return sum(group.ranks for group in self._groups)

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
        wait_for_ends(stopping, max(self._spec.bundle.limits.end, END_FACTOR * self._slowest_end))
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
        self._release(*self._pending, *self._groups)
        for unresponsive in self._unresponsive:
            unresponsive.worker_group.release()
        self._slots = []
        self._unresponsive = []
        self._heartbeats.close()

    # -- worker groups

    def _suits(self, group: AnyGroup) -> bool:
        """Whether the present attempt can use the group: its ranks can be divided into those that should share a node.

        A group that is spread over nodes can be used only for as many as it was made for.
        """
        divides = group.has_one_actor and group.ranks % self._together == 0
        return group.spec == self._spec and (group.ranks == self._together or divides)

    def _surplus(self) -> int:
        """The number of ready and pending workers beyond those to keep ready; negative if some are missing."""
        present = self.ready() + sum(pending.ranks for pending in self._pending)
        return present - self._target_workers // self._together * self._together

    def _room(self, alive: Sequence[nodes.Node]) -> dict[str, int]:
        """Return for how many workers each node has room, by id."""
        avoided = self._avoid | self._suspected_nodes()
        return {node.id: free for node, free in nodes.free_by_node(alive, self._spec.bundle, avoided)}

    def _request(self, workers: int, alive: Sequence[nodes.Node], room: Mapping[str, int]) -> None:
        """Request worker groups for `workers` workers, as few as there are nodes with room."""
        avoid = self._avoid | self._suspected_nodes()
        for ranks in group_sizes(workers, room.values(), self._together):
            self._pending.append(PendingGroup(self._spec, ranks, avoid, alive, shared=self._shared))

    def _request_missing(self) -> None:
        """Request the workers that are missing of those to keep ready, as far as there is room."""
        missing = -self._surplus()
        if missing <= 0:
            return
        alive = nodes.alive()
        room = self._room(alive)
        fitting = sum(free // self._together for free in room.values())
        # A group may also be spread, if no node has room for all of it.
        fitting = max(fitting, int(sum(room.values()) >= self._together))
        self._request(min(missing, fitting * self._together), alive, room)

    def _request_rest(self, workers: int, unfit: Sequence[WorkerGroup] = ()) -> None:
        """Request worker groups until some that are ready or pending have exactly `workers` ranks together.

        Args:
            workers: the ranks of the present attempt.
            unfit: ready groups that it cannot use, which are released.
        """
        left = set(unfit)
        present: list[AnyGroup] = [*(group for group in self._groups if group not in left), *self._pending]
        kept = _within(present, workers)
        missing = workers - sum(group.ranks for group in kept)
        if not missing:
            self._release(*unfit)
            return
        alive = nodes.alive()
        room = self._room(alive)
        others = set(present) - set(kept)
        # They are larger than what is missing. The rest of a group cannot be given back, and others may need it.
        released: list[AnyGroup] = [*unfit, *sorted(others, key=lambda group: group.ranks)[:1]]
        for group in released:
            if isinstance(group, WorkerGroup) and group.spec.bundle == self._spec.bundle:
                for node in (node for node, _ in group.locations if node in room):
                    room[node] += 1  # Ray says so later
        self._release(*released)
        self._request(missing, alive, room)

    def _divide_late(self) -> None:
        """Request the smallest groups in place of those that Ray does not grant because they find no room."""
        now = time.monotonic()
        late = [
            group
            for group in self._pending
            if not group.granted and group.ranks > self._together and now - group.since > DIVIDED_AFTER
        ]
        if not late:
            return
        alive = nodes.alive()
        largest = max(self._room(alive).values(), default=0)
        for group in late:
            group.since = now
            if group.ranks > largest:
                self._release(group)
                self._request(group.ranks, alive, {})

    def _release_surplus(self) -> None:
        """Release the worker groups beyond those to keep ready, for others need their room. Ranks keep theirs."""
        used = {group for group, _ in self._slots}
        self._release(*_within(self._pending, self._surplus()))
        self._release(*_within((group for group in self._groups if group not in used), self._surplus()))
        larger: list[AnyGroup] = [*self._pending, *(group for group in self._groups if group not in used)]
        if larger and self._surplus() > 0:  # what is missing then is requested again
            self._release(min(larger, key=lambda group: group.ranks))

    def _wait_for_workers(self, workers: int) -> list[WorkerGroup]:
        """Wait until ready groups have exactly `workers` ranks together, and return them.

        Raises:
            TimeoutError: that takes too long. The pending groups are released then.
        """
        started = time.monotonic()
        while True:
            chosen = _within(sorted(self._groups, key=_address), workers)
            missing = workers - sum(group.ranks for group in chosen)
            if not missing:
                return chosen
            self._reclaim_responsive()
            self._advance(wait=0.05)
            waited = time.monotonic() - started
            waiting = [pending for pending in self._pending if not pending.granted]
            if (waiting and waited > PLACEMENT_TIMEOUT) or waited > PLACEMENT_TIMEOUT + START_TIMEOUT:
                late = self._late_text(waiting)
                self._release(*self._pending)
                problem = "no room for" if waiting else "the processes did not start for"
                count = f"{missing // self._together} of {workers // self._together}"
                text = f"{problem} {count} groups of {workers_text(self._together)}"
                raise TimeoutError(f"{text} with {self._spec.bundle} within {waited:.0f} s{late}")
            self._divide_late()
            self._request_rest(workers)

    def _late_text(self, waiting: Sequence[PendingGroup]) -> str:
        """Return which nodes `_wait_for_workers` waits for: with too little room, or whose processes did not start."""
        if waiting:
            avoided = self._avoid | self._suspected_nodes()
            free = nodes.free_by_node(nodes.alive(), self._spec.bundle, avoided)
            places = [
                f"{workers} on {address}" for address, workers in sorted((n.address, w) for n, w in free)
            ]
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
                self._release(pending)

    def _check_nodes(self) -> None:
        """Request missing worker groups for which there is room, and mark the ranks whose nodes are being drained."""
        self._reclaim_responsive()
        self._divide_late()
        self._request_missing()
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

    def _release(self, *groups: AnyGroup) -> None:
        for group in groups:
            if isinstance(group, WorkerGroup):
                self._groups.remove(group)
            else:
                self._pending.remove(group)
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
            self._release(*_within(self._pending, self._surplus()))

    def _is_usable(self, group: WorkerGroup) -> bool:
        """Whether the present attempt can use the group, and needs one more."""
        is_avoided = any(address in self._avoid for _, address in group.locations)
        is_needed = self.ready() + group.ranks <= self._target_workers
        return self._suits(group) and is_needed and not is_avoided

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
                of_host = ranks[first : first + group.ranks // len(group.hosts)]
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
        limit = self._spec.bundle.limits.end
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


def _address(group: WorkerGroup) -> tuple[str, ...]:
    """Return the address and the id of a group's first node, by which groups are ordered."""
    return group.locations[0][::-1]


def _within(groups: Iterable[Group], workers: int) -> list[Group]:
    """Return groups with at most `workers` ranks together, taking the largest first."""
    result = []
    for group in sorted(groups, key=lambda group: -group.ranks):
        if group.ranks <= workers:
            result.append(group)
            workers -= group.ranks
    return result


def _listed(names: Sequence[str]) -> str:
    """Return at most NAMED names, and the number of the others."""
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])

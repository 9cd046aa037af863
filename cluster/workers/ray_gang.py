"""A gang of Ray actors: a placement group for each group of ranks that must share a node."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Set
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError

from cluster.workers import nodes
from cluster.workers.fork_server import START_TIMEOUT
from cluster.workers.gang import Bundle, Cause, End, GangStatus, RankStatus
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.worker_context import RankInfo
from cluster.workers.worker_group import PendingGroup, UnresponsiveGroup, WorkerGroup

PLACEMENT_TIMEOUT = 30.0
"""Seconds for placement groups that should fit to be granted."""
ANSWER = 1.0
"""Seconds for the actor of a rank, or a node's raylet, to answer what takes it milliseconds."""
STALL = 5.0
"""Seconds that a place which does not answer is waited for where its node does."""
SUSPECT = 60.0
"""Seconds that a node which did not answer gets no ranks, unless it answers or Ray has found it dead by then."""
LAUNCH = 20.0
"""Seconds for a place with all imports done to start a rank, which takes it milliseconds."""
LOOK = 1.0
"""Seconds between looks at which nodes are to be taken away."""


class RayGang:
    """Ranks numbered room by room, rooms by address. Rooms stay between attempts, and what `hold` asks for beyond
    those in use is made ready beside the running ranks.

    Everything belongs to the process that started it: if that dies, Ray and the kernel end the rest.
    """

    def __init__(self) -> None:
        self._watch = HeartbeatServer(ray.util.get_node_ip_address())
        self._rooms: list[WorkerGroup] = []
        self._openings: list[PendingGroup] = []
        self._seats: list[tuple[WorkerGroup, int]] = []
        self._kind: tuple[int, Bundle, str] = (1, Bundle(), "")
        self._avoid: frozenset[str] = frozenset()
        self._held = 0
        self._silent: list[UnresponsiveGroup] = []
        self._suspects: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._looked = 0.0

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`."""
        self._take_back()
        self._advance(wait=0.0)  # nobody polls while the run waits, and what is on its way occupies its nodes
        held = sum(len(room.hosts) for room in self._sound(avoid) if room.bundle == bundle)
        held += sum(opening.granted for opening in self._openings if opening.bundle == bundle)
        return held + nodes.free(bundle, avoid | self._unsafe())

    def start(
        self,
        world: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        together: int = 1,
        avoid: Set[str] = frozenset(),
    ) -> None:
        """See `Gang.start`."""
        kind = (together, bundle, target)
        if kind != self._kind:
            for opening in self._openings:
                opening.give_up()
            self._openings = []
        self._kind, self._avoid, self._held = kind, frozenset(avoid), world
        sound = self._sound(avoid)
        for room in list(self._rooms):
            if room.kind != kind or room not in sound:
                self._release(room)
        self._open(world // together)
        self._wait_for(world // together)
        self._rooms.sort(key=lambda room: room.places[0][::-1])
        chosen = self._rooms[: world // together]
        self._seats = [(room, place) for room in chosen for place in range(together)]
        self._launch(target, config)

    def hold(self, count: int) -> None:
        """See `Gang.hold`."""
        self._held = count

    def ready(self) -> int:
        """See `Gang.ready`."""
        return sum(len(room.hosts) for room in self._rooms)

    def lost(self) -> Set[str]:
        """See `Gang.lost`."""
        return {address for node, address in self._addresses.items() if node in self._unsafe()}

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self._look()
        return self._watch.poll(saved, wait, self._cause)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        self._watch.tell({"stop": True})

    def stop(self) -> None:
        """See `Gang.stop`."""
        # Those without ranks too: their nodes may be gone as well.
        asked = [UnresponsiveGroup(room) for room in self._rooms]
        self._seats = []
        answers = [answer for silent in asked for answer in silent.answers]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=ANSWER)
        gone = []
        for silent in asked:
            try:
                if silent.has_answered():
                    continue
                self._silent.append(silent)
                self._rooms.remove(silent.room)
            except RayError:
                self._release(silent.room)
            gone.append(silent.room)
        self._suspect(*gone)

    def close(self) -> None:
        """See `Gang.close`."""
        for opening in self._openings:
            opening.give_up()
        for room in list(self._rooms):
            self._release(room)
        for silent in self._silent:
            silent.room.give_up()
        self._seats, self._openings, self._silent = [], [], []
        self._watch.close()

    # -- rooms

    def _open(self, rooms: int) -> None:
        """Begin as many as are missing."""
        together, bundle, target = self._kind
        refused = self._avoid | self._unsafe()
        for _ in range(rooms - len(self._rooms) - len(self._openings)):
            self._openings.append(PendingGroup(together, bundle, target, refused))

    def _wait_for(self, rooms: int) -> None:
        """Until that many are there. Raises TimeoutError, and gives up those on their way, if they are not granted
        in time."""
        began = time.monotonic()
        while len(self._rooms) < rooms:
            self._take_back()
            self._advance(wait=0.05)
            waited = time.monotonic() - began
            waiting = [opening for opening in self._openings if not opening.granted]
            if (waiting and waited > PLACEMENT_TIMEOUT) or waited > PLACEMENT_TIMEOUT + START_TIMEOUT:
                for opening in self._openings:
                    opening.give_up()
                self._openings = []
                what = "no room for" if waiting else "the processes do not start of"
                text = f"{what} {rooms - len(self._rooms)} of {rooms} groups of {self._kind[0]} workers"
                raise TimeoutError(f"{text} with {self._kind[1]} within {waited:.0f} s")
            if not self._openings:
                self._open(rooms)

    def _advance(self, wait: float) -> None:
        for opening in list(self._openings):
            try:
                if room := opening.advance(wait):
                    self._rooms.append(room)
                    self._openings.remove(opening)
            except RayError:
                opening.give_up()
                self._openings.remove(opening)

    def _look(self) -> None:
        """Make ready what is to be held, and see which ranks are to be taken away."""
        self._take_back()
        together, bundle, _ = self._kind
        missing = self._held // together - len(self._rooms) - len(self._openings)
        if missing > 0 and nodes.free(bundle, self._avoid | self._unsafe()) >= together:
            self._open(len(self._rooms) + len(self._openings) + 1)
        self._advance(wait=0.0)
        drained = nodes.leaving()
        for number, (room, place) in enumerate(self._seats):
            if room.places[place][0] in drained:
                self._watch.mark(number, leaving=True)

    def _sound(self, avoid: Set[str]) -> list[WorkerGroup]:
        """The rooms whose nodes are there, and neither leaving nor to be avoided."""
        here = {node.id for node in nodes.alive()} - self._unsafe() - nodes.leaving()
        return [
            room
            for room in self._rooms
            if all(node in here and address not in avoid for node, address in room.places)
        ]

    def _release(self, room: WorkerGroup) -> None:
        self._rooms.remove(room)
        room.give_up()

    def _lose(self, room: WorkerGroup) -> None:
        if room in self._rooms:
            self._suspect(room)
            self._release(room)

    def _suspect(self, *rooms: WorkerGroup) -> None:
        """Take the nodes of these rooms for lost unless they answer: a place may die alone."""
        places = dict(place for room in rooms for place in room.places if place[0] not in self._suspects)
        if places:
            self._suspects |= dict.fromkeys(nodes.unreachable(places, ANSWER), time.monotonic())
            self._addresses |= places

    def _take_back(self) -> None:
        """The rooms that answer after all, as they do once a cut network is mended, if they are still of use."""
        here = {node.id for node in nodes.alive()} if self._silent else set()
        for silent in list(self._silent):
            where = {node for node, _ in silent.room.places}
            # Where Ray has lost the node, it would have the room again elsewhere, and nobody could use it there.
            patience = (SUSPECT if where & self._unsafe() else STALL) if where <= here else 0.0
            try:
                answered, given_up = silent.has_answered(), time.monotonic() - silent.since > patience
            except RayError:
                answered, given_up = False, True
            if not (answered or given_up):
                continue
            self._silent.remove(silent)
            for node, _ in silent.room.places if answered else ():
                self._suspects.pop(node, None)
            if not answered or not self._is_of_use(silent.room):
                silent.room.give_up()
                continue
            self._rooms.append(silent.room)
            if self._openings and (len(self._rooms) + len(self._openings)) * self._kind[0] > self._held:
                self._openings.pop().give_up()

    def _is_of_use(self, room: WorkerGroup) -> bool:
        avoided = any(address in self._avoid for _, address in room.places)
        return (
            room.kind == self._kind and not avoided and (len(self._rooms) + 1) * self._kind[0] <= self._held
        )

    def _unsafe(self) -> set[str]:
        now = time.monotonic()
        self._suspects = {node: at for node, at in self._suspects.items() if now - at < SUSPECT}
        return set(self._suspects)

    # -- ranks

    def _launch(self, target: str, config: dict[str, Any]) -> None:
        places = [room.places[place] for room, place in self._seats]
        token = self._watch.expect([address for _, address in places])
        words = {"target": target, "config": config, "watcher": self._watch.address, "token": token}
        seen: dict[str, int] = {}
        launched = []
        for number, ((room, place), (node, address)) in enumerate(zip(self._seats, places, strict=True)):
            local_rank = seen[node] = seen.get(node, -1) + 1
            seat = RankInfo(number, len(places), local_rank, places[0][1], node=address)
            launched.append(room.hosts[place].launch.remote({"seat": dataclasses.asdict(seat), **words}))
        for (room, _), (_, address), reference in zip(self._seats, places, launched, strict=True):
            try:
                ray.get(reference, timeout=LAUNCH)
            except RayError as error:
                self._lose(room)
                raise TimeoutError(f"a worker on {address} did not start: {_first_line(error)}") from None

    def _cause(self, rank: RankStatus) -> tuple[Cause, str]:
        """Why a rank is gone: how its process ended, or that its whole node does not answer."""
        room, place = self._seats[rank.rank]
        deadline = time.monotonic() + ANSWER
        try:
            while time.monotonic() < deadline:
                if cause := ray.get(room.hosts[place].cause.remote(rank.pid), timeout=ANSWER):
                    if cause.end == "lost":
                        self._lose(room)
                    return cause, cause.text or "the process that starts ranks has ended"
        except RayError as error:
            self._lose(room)  # now, so that nobody waits for its answer again
            end: End = "starved" if isinstance(error, OutOfMemoryError) else "lost"
            return Cause(end, name="place"), f"the node or its Ray worker is gone: {_first_line(error)}"
        return Cause("lost", name="answer"), f"no answer from {rank.node} within {ANSWER:g} s"


def _first_line(error: RayError) -> str:
    """Why Ray says that an actor is gone, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = (line for line in lines if "cause" in line.lower() or "killed" in line.lower())
    return next(told, lines[0] if lines else type(error).__name__)[:300]

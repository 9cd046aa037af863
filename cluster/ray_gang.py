"""A gang of Ray actors: a placement group for each group of ranks that must share a node."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import nodes
from cluster.gang import Beat, Bundle, RankStatus
from cluster.link import Seat
from cluster.watch import Watch
from cluster.zygote import START_TIMEOUT, Zygote

PLACEMENT_TIMEOUT = 30.0
"""Seconds for placement groups that should fit to be granted."""
ANSWER = 1.0
"""Seconds for the actor of a rank to answer a question that takes it milliseconds; else its node is taken for lost."""
SUSPECT = 60.0
"""Seconds that a node which did not answer gets no ranks, unless Ray has found it dead by then."""
LOOK = 1.0
"""Seconds between looks at which nodes are to be taken away."""


class RayHost:
    """An actor in a bundle. It starts ranks and sees how they end; it imports nothing heavy."""

    def __init__(self, target: str) -> None:
        self._zygote = Zygote(target)

    def place(self) -> tuple[str, str]:
        """The id and the address of its node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def launch(self, rank: dict[str, Any]) -> int:
        """End the rank before, fork the next; returns its process id."""
        self._zygote.end_ranks()
        return self._zygote.launch(**rank)

    def end_ranks(self) -> None:
        """Kill the rank."""
        self._zygote.end_ranks()

    def exits(self) -> dict[int, int]:
        """See `Zygote.exits`."""
        return self._zygote.exits()

    def end_of(self, pid: int) -> str:
        """How the rank of that process id ended, in words; empty while it has not."""
        code = self._zygote.exits().get(pid)
        if code is None:
            return ""
        starved = code == -9 and self._zygote.starved()
        return f"process ended with exit code {code}" + "; the kernel ended it for want of memory" * starved


@dataclass(frozen=True)
class Room:
    """A granted placement group with an actor in each of its bundles; `places` are their nodes and addresses."""

    group: PlacementGroup
    bundle: Bundle
    target: str
    hosts: tuple[Any, ...]
    places: tuple[tuple[str, str], ...]


class Opening:
    """A room on its way: its placement group is granted, its actors start, their imports end."""

    def __init__(self, together: int, bundle: Bundle, target: str, avoid: Set[str]) -> None:
        present = nodes.alive()
        packed = any(nodes.room(n.total, n.labels, bundle) >= together for n in present)
        refused = sorted(n.id for n in present if n.id in avoid or n.address in avoid)
        labels = dict(bundle.labels) | ({"ray.io/node-id": f"!in({','.join(refused)})"} if refused else {})
        self.group = placement_group(
            [bundle.resources] * together,
            strategy="STRICT_PACK" if packed else "PACK",
            bundle_label_selector=[labels] * together if labels else None,
        )
        self._together, self._bundle, self._target = together, bundle, target
        self._ready: Any = self.group.ready()
        self._hosts: list[Any] = []
        self._answers: list[Any] = []

    def advance(self, wait: float) -> Room | None:
        """The room, once it is there. Raises RayError if its actors die before."""
        if not self._hosts and self._is_granted(wait):
            remote: Any = ray.remote(RayHost)
            for number in range(self._together):
                where = PlacementGroupSchedulingStrategy(self.group, number)
                worker = remote.options(
                    num_cpus=self._bundle.cpu, num_gpus=self._bundle.gpu, scheduling_strategy=where
                )
                self._hosts.append(worker.remote(self._target))
            self._answers = [h.place.remote() for h in self._hosts] + [h.exits.remote() for h in self._hosts]
        if not self._hosts or ray.wait(self._answers, num_returns=len(self._answers), timeout=wait)[1]:
            return None
        places = [tuple(place) for place in ray.get(self._answers[: self._together])]
        return Room(self.group, self._bundle, self._target, tuple(self._hosts), tuple(places))

    def give_up(self) -> None:
        """Release what is there of it."""
        _release(self.group, self._hosts)

    def _is_granted(self, wait: float) -> bool:
        return bool(ray.wait([self._ready], timeout=wait)[0])

    @property
    def granted(self) -> bool:
        """Whether its placement group is there."""
        return bool(self._hosts)


class RayGang:
    """Ranks numbered room by room, rooms by address. Rooms stay between attempts, and what `hold` asks for beyond
    those in use is made ready beside the running ranks.

    Everything belongs to the process that started it: if that dies, Ray and the kernel end the rest.
    """

    def __init__(self) -> None:
        self._watch = Watch(ray.util.get_node_ip_address())
        self._rooms: list[Room] = []
        self._openings: list[Opening] = []
        self._seats: list[tuple[Room, int]] = []
        self._kind: tuple[int, Bundle, str] = (1, Bundle(), "")
        self._avoid: frozenset[str] = frozenset()
        self._held = 0
        self._suspects: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._looked = 0.0

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`."""
        held = sum(len(room.hosts) for room in self._sound(avoid) if room.bundle == bundle)
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
            if (len(room.hosts), room.bundle, room.target) != kind or room not in sound:
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

    def poll(self, saved: int, wait: float = 0.0) -> Beat:
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
        held = [(room, place) for room, place in self._seats if room in self._rooms]
        asked = {room.hosts[place].end_ranks.remote(): room for room, place in held}
        self._seats = []
        if not asked:
            return
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER)
        for reference, room in asked.items():
            try:
                if reference not in answered:
                    raise TimeoutError
                ray.get(reference)
            except (RayError, TimeoutError):
                self._lose(room)

    def close(self) -> None:
        """See `Gang.close`."""
        for opening in self._openings:
            opening.give_up()
        for room in list(self._rooms):
            self._release(room)
        self._seats, self._openings = [], []
        self._watch.close()

    # -- rooms

    def _open(self, rooms: int) -> None:
        """Begin as many as are missing."""
        together, bundle, target = self._kind
        refused = self._avoid | self._unsafe()
        for _ in range(rooms - len(self._rooms) - len(self._openings)):
            self._openings.append(Opening(together, bundle, target, refused))

    def _wait_for(self, rooms: int) -> None:
        """Until that many are there. Raises TimeoutError, and gives up those on their way, if they are not granted
        in time."""
        began = time.monotonic()
        while len(self._rooms) < rooms:
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
        together, bundle, _ = self._kind
        missing = self._held // together - len(self._rooms) - len(self._openings)
        if missing > 0 and nodes.free(bundle, self._avoid | self._unsafe()) >= together:
            self._open(len(self._rooms) + len(self._openings) + 1)
        self._advance(wait=0.0)
        drained = nodes.leaving()
        for number, (room, place) in enumerate(self._seats):
            if room.places[place][0] in drained:
                self._watch.mark(number, leaving=True)

    def _sound(self, avoid: Set[str]) -> list[Room]:
        """The rooms whose nodes are there, and neither leaving nor to be avoided."""
        here = {node.id for node in nodes.alive()} - self._unsafe() - nodes.leaving()
        return [
            room
            for room in self._rooms
            if all(node in here and address not in avoid for node, address in room.places)
        ]

    def _release(self, room: Room) -> None:
        self._rooms.remove(room)
        _release(room.group, room.hosts)

    def _lose(self, room: Room) -> None:
        if room in self._rooms:
            self._suspects |= {node: time.monotonic() for node, _ in room.places}
            self._addresses |= dict(room.places)
            self._release(room)

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
            seat = Seat(number, len(places), local_rank, places[0][1], node=address)
            launched.append(room.hosts[place].launch.remote({"seat": dataclasses.asdict(seat), **words}))
        for (room, _), (_, address), reference in zip(self._seats, places, launched, strict=True):
            try:
                ray.get(reference, timeout=START_TIMEOUT)
            except RayError as error:
                self._lose(room)
                raise TimeoutError(f"a worker on {address} did not start: {_first_line(error)}") from None

    def _cause(self, rank: RankStatus) -> str:
        """Why a rank is gone: how its process ended, or that its whole node does not answer."""
        room, place = self._seats[rank.rank]
        deadline = time.monotonic() + ANSWER
        try:
            while time.monotonic() < deadline:
                if told := ray.get(room.hosts[place].end_of.remote(rank.pid), timeout=ANSWER):
                    return str(told)
        except RayError as error:
            self._lose(room)  # now, so that nobody waits for its answer again
            return f"the node or its Ray worker is gone: {_first_line(error)}"
        return f"no answer from {rank.node} within {ANSWER:g} s"


def _release(group: PlacementGroup, hosts: Iterable[Any]) -> None:
    for host in hosts:
        with contextlib.suppress(RayError):
            ray.kill(host)
    with contextlib.suppress(RayError):
        remove_placement_group(group)


def _first_line(error: RayError) -> str:
    """Why Ray says that an actor is gone, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = (line for line in lines if "cause" in line.lower() or "killed" in line.lower())
    return next(told, lines[0] if lines else type(error).__name__)[:300]

"""Whose turn it is on a cluster that several jobs share: a pure function of what they ask for and what is free.

The highest priority goes first, of equals the one that has waited longest; nobody overtakes the first that waits. (One
that would not fit if it had all nodes to itself waits for nodes that are not there, and nobody waits for it.) A job
that has begun keeps what it holds. If the first that waits would fit once jobs of lower priority are gone, they are
asked to make room, the lowest and the latest first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.workers.gang import Bundle

if TYPE_CHECKING:
    from cluster.workers.nodes import Node


@dataclass(frozen=True)
class QueuedJob:
    """What one job, known by its run directory, asks for: `least` to `most` workers of one size. `places` are the
    addresses of the nodes of those it has. `since` is when it began to wait, unix seconds; `running` once it was its
    turn."""

    name: str
    priority: int
    since: float
    bundle: Bundle
    least: int
    most: int
    places: tuple[str, ...] = ()
    running: bool = False

    @property
    def short(self) -> str:
        """The last part of the name, for people."""
        return self.name.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Admission:
    """Whether the job may go; with how many workers at most; what it waits for; for whom it should make room; whether
    the nodes that there are would do if nobody else were on them."""

    go: bool
    room: int = 0
    waits_for: str = ""
    yield_to: str = ""
    possible: bool = True


class _FreeCapacity:
    """What is free on each node, taken and given back bundle by bundle."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = [dataclasses.replace(node, free=dict(node.free)) for node in nodes]

    def take(self, bundle: Bundle, count: int) -> tuple[str, ...]:
        """Take up to `count` bundles, first fit; the addresses of the nodes where they were."""
        taken: list[str] = []
        for node in (node for node in self.nodes if bundle.suits(node.labels)):
            while len(taken) < count and all(
                node.free.get(key, 0.0) + 1e-6 >= value for key, value in bundle.resources.items()
            ):
                self._add(node, bundle, -1)
                taken.append(node.address)
        return tuple(taken)

    def emptied(self) -> _FreeCapacity:
        """The same nodes with nobody on them."""
        return _FreeCapacity([dataclasses.replace(node, free=node.total) for node in self.nodes])

    def give(self, bundle: Bundle, places: Sequence[str]) -> None:
        """Give a bundle back at each of these addresses; nodes that are gone get none."""
        at = {node.address: node for node in self.nodes}
        for place in places:
            if place in at:
                self._add(at[place], bundle, 1)

    def fits(self, bundle: Bundle, count: int) -> int:
        """How many of `count` bundles there is room for."""
        return len(_FreeCapacity(self.nodes).take(bundle, count))

    @staticmethod
    def _add(node: Node, bundle: Bundle, sign: int) -> None:
        for key, value in bundle.resources.items():
            node.free[key] = node.free.get(key, 0.0) + sign * value


def admissions(tickets: Sequence[QueuedJob], nodes: Sequence[Node]) -> dict[str, Admission]:
    """The verdict on every ticket, on nodes where so much is free."""
    room = _FreeCapacity(nodes)
    order = sorted((t for t in tickets if not t.running), key=lambda t: (-t.priority, t.since, t.name))
    running = [t for t in tickets if t.running]
    places = {t.name: t.places for t in running}
    for ticket in running:
        if not ticket.places:  # it prepares data, or recovers: what it is about to take is not free
            places[ticket.name] = room.take(ticket.bundle, ticket.most)
    found: dict[str, Admission] = {}
    first: QueuedJob | None = None
    for ticket in order:
        fitting, ever = (r.fits(ticket.bundle, ticket.least) for r in (room, room.emptied()))
        if ever < ticket.least:
            told = f"{ticket.least} workers of {ticket.bundle}; all nodes together have room for {ever}"
            found[ticket.name] = Admission(False, waits_for=told, possible=False)
            continue
        if first is not None:
            found[ticket.name] = Admission(False, waits_for=f"{first.short} comes first")
            continue
        if fitting >= ticket.least:
            places[ticket.name] = room.take(ticket.bundle, ticket.most)
            found[ticket.name] = Admission(True, ticket.most)
            running = [*running, ticket]
            continue
        first = ticket
        found[ticket.name] = Admission(False, waits_for=_what(ticket, fitting, running))
    lower = [] if first is None else [t for t in running if t.priority < first.priority]
    lower.sort(key=lambda t: (t.priority, -t.since))
    victims = [] if first is None else _victims(first, room, lower, places)
    for ticket in running:
        yields = first.short if first is not None and ticket in victims else ""
        # While somebody waits, nobody grows.
        most = len(ticket.places) if first is not None and ticket.places else ticket.most
        found[ticket.name] = Admission(True, most, yield_to=yields)
    return found


def _victims(
    first: QueuedJob, room: _FreeCapacity, lower: Sequence[QueuedJob], places: dict[str, tuple[str, ...]]
) -> list[QueuedJob]:
    """The first of `lower` whose places would do for `first`, without those that it does not need; none if all of
    them would not do."""

    def would_do(victims: Sequence[QueuedJob]) -> bool:
        then = _FreeCapacity(room.nodes)
        for ticket in victims:
            then.give(ticket.bundle, places[ticket.name])
        return then.fits(first.bundle, first.least) >= first.least

    victims = next((list(lower[:count]) for count in range(1, len(lower) + 1) if would_do(lower[:count])), [])
    for ticket in reversed(victims):
        others = [other for other in victims if other is not ticket]
        victims = others if would_do(others) else victims
    return victims


def _what(ticket: QueuedJob, fitting: int, running: Sequence[QueuedJob]) -> str:
    """What the first in line waits for, in words."""
    others = ", ".join(sorted(t.short for t in running)) or "nobody"
    return f"{ticket.least} workers of {ticket.bundle}; there is room for {fitting}, and at work: {others}"

"""Whose turn it is on a cluster that several jobs share: a pure function of what they ask for and what is free.

The highest priority goes first, of equals the one that has waited longest; nobody overtakes the first that waits. A
job that has begun keeps what it holds. If the first that waits would fit once jobs of lower priority are gone, they
are asked to make room, the lowest and the latest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.gang import Bundle


@dataclass(frozen=True)
class Ticket:
    """What one job, known by its run directory, asks for: `least` to `most` workers of one size, of which it holds
    `held`. `since` is when it began to wait, unix seconds; `running` once it was its turn."""

    name: str
    priority: int
    since: float
    bundle: Bundle
    least: int
    most: int
    held: int = 0
    running: bool = False

    @property
    def short(self) -> str:
        """The last part of the name, for people."""
        return self.name.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Verdict:
    """Whether the job may go; with how many workers at most; what it waits for; for whom it should make room."""

    go: bool
    room: int = 0
    waits_for: str = ""
    yield_to: str = ""


@dataclass
class _Nodes:
    """What is free on each node, with the node's labels, taken bundle by bundle."""

    free: list[tuple[dict[str, float], Mapping[str, str]]] = field(default_factory=list)

    def take(self, bundle: Bundle, count: int) -> int:
        """Take up to `count` bundles, first fit; how many there were."""
        taken = 0
        needs = bundle.resources
        for node in (node for node, labels in self.free if bundle.suits(labels)):
            while taken < count and all(node.get(k, 0.0) + 1e-6 >= v for k, v in needs.items()):
                for key, value in needs.items():
                    node[key] -= value
                taken += 1
        return taken

    def fits(self, bundle: Bundle, count: int) -> int:
        """How many of `count` bundles there is room for."""
        return _Nodes([(dict(node), labels) for node, labels in self.free]).take(bundle, count)


def verdicts(
    tickets: Sequence[Ticket], free: Sequence[tuple[Mapping[str, float], Mapping[str, str]]]
) -> dict[str, Verdict]:
    """The verdict on every ticket; `free` is what each node has left of CPU and GPU, and its labels."""
    nodes = _Nodes([(dict(node), labels) for node, labels in free])
    order = sorted((t for t in tickets if not t.running), key=lambda t: (-t.priority, t.since, t.name))
    running = [t for t in tickets if t.running]
    for ticket in running:
        if not ticket.held:  # it prepares data, or recovers: what it is about to take is not free
            nodes.take(ticket.bundle, ticket.most)
    found: dict[str, Verdict] = {}
    first: Ticket | None = None
    for ticket in order:
        if first is not None:
            found[ticket.name] = Verdict(False, waits_for=f"{first.short} comes first")
            continue
        fitting = nodes.fits(ticket.bundle, ticket.least)
        if fitting >= ticket.least:
            nodes.take(ticket.bundle, ticket.most)
            found[ticket.name] = Verdict(True, ticket.most)
            running = [*running, ticket]
            continue
        first = ticket
        found[ticket.name] = Verdict(False, waits_for=_what(ticket, fitting, running))
    victims = _victims(first, nodes, running) if first is not None else []
    for ticket in running:
        yields = first.short if first is not None and ticket in victims else ""
        # While somebody waits, nobody grows.
        room = ticket.held if first is not None and ticket.held else ticket.most
        found[ticket.name] = Verdict(True, room, yield_to=yields)
    return found


def _victims(first: Ticket, nodes: _Nodes, running: Sequence[Ticket]) -> list[Ticket]:
    """The jobs that should make room, none if that would not help. Where on the nodes their workers are is not
    known here, so room is counted as if each job's were on one, which has the labels that this job has asked for."""
    lower = sorted((t for t in running if t.priority < first.priority), key=lambda t: (t.priority, -t.since))
    given: list[tuple[dict[str, float], Mapping[str, str]]] = []
    for count, ticket in enumerate(lower, start=1):
        held = ticket.held or ticket.most
        room = {key: value * held for key, value in ticket.bundle.resources.items()}
        given.append((room, ticket.bundle.labels))
        if _Nodes([*nodes.free, *given]).fits(first.bundle, first.least) >= first.least:
            return lower[:count]
    return []


def _what(ticket: Ticket, fitting: int, running: Sequence[Ticket]) -> str:
    """What the first in line waits for, in words."""
    others = ", ".join(sorted(t.short for t in running)) or "nobody"
    return f"{ticket.least} workers of {ticket.bundle}; there is room for {fitting}, and at work: {others}"

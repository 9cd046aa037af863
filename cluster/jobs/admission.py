"""Decide which jobs are admitted to a shared cluster: a pure function of their requests and the free resources.

Jobs are admitted by priority, and jobs of equal priority in the order in which they began to wait. No job overtakes the
first waiting job, except that a job that would not fit on the empty cluster waits for more nodes and blocks no other.
An admitted job keeps its workers. If the first waiting job would fit without running jobs of lower priority, these are
asked to yield, beginning with the lowest priority and the latest start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.workers.gang import Bundle, workers_text

if TYPE_CHECKING:
    from cluster.workers.nodes import Node


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue."""

    name: str
    """Its run directory."""
    priority: int
    since: float
    """When it began to wait, unix seconds."""
    bundle: Bundle
    """The resources that one of its workers occupies."""
    least: int
    """The smallest number of workers that it can run on."""
    most: int
    """The largest number of workers that it can use."""
    places: tuple[str, ...] = ()
    """The node address of each of its workers."""
    running: bool = False
    """Whether it has been admitted."""

    @property
    def short(self) -> str:
        """The last part of the name, for messages."""
        return self.name.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Admission:
    """The queue's answer to a job."""

    go: bool
    """Whether it is admitted."""
    room: int = 0
    """How many workers an admitted job may have."""
    waits_for: str = ""
    """The reason why a job waits, as text for people."""
    yield_to: str = ""
    """The job for which it should commit and end; empty without one."""
    possible: bool = True
    """Whether it would fit on the cluster's nodes if they were empty."""


class _FreeCapacity:
    """The free resources of each node, allocated and released bundle by bundle."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = [dataclasses.replace(node, free=dict(node.free)) for node in nodes]

    def take(self, bundle: Bundle, count: int) -> tuple[str, ...]:
        """Allocate up to `count` bundles, first fit. Return the node address of each."""
        taken: list[str] = []
        for node in (node for node in self.nodes if bundle.suits(node.labels)):
            while len(taken) < count and all(
                node.free.get(key, 0.0) + 1e-6 >= value for key, value in bundle.resources.items()
            ):
                self._add(node, bundle, -1)
                taken.append(node.address)
        return tuple(taken)

    def emptied(self) -> _FreeCapacity:
        """Return the same nodes with all of their resources free."""
        return _FreeCapacity([dataclasses.replace(node, free=node.total) for node in self.nodes])

    def give(self, bundle: Bundle, addresses: Sequence[str]) -> None:
        """Release a bundle at each of these node addresses. Nodes that are gone are skipped."""
        at = {node.address: node for node in self.nodes}
        for address in addresses:
            if address in at:
                self._add(at[address], bundle, 1)

    def fits(self, bundle: Bundle, count: int) -> int:
        """Return how many of `count` bundles fit."""
        return len(_FreeCapacity(self.nodes).take(bundle, count))

    @staticmethod
    def _add(node: Node, bundle: Bundle, sign: int) -> None:
        for key, value in bundle.resources.items():
            node.free[key] = node.free.get(key, 0.0) + sign * value


def admissions(tickets: Sequence[QueuedJob], nodes: Sequence[Node]) -> dict[str, Admission]:
    """Return the answer to every job, by name, for the given nodes and their free resources."""
    free = _FreeCapacity(nodes)
    waiting = sorted((t for t in tickets if not t.running), key=lambda t: (-t.priority, t.since, t.name))
    running = [t for t in tickets if t.running]
    addresses_by_job = {t.name: t.places for t in running}
    for ticket in running:
        if not ticket.places:  # it prepares data or restarts, so what it is about to use is reserved
            addresses_by_job[ticket.name] = free.take(ticket.bundle, ticket.most)
    result: dict[str, Admission] = {}
    first: QueuedJob | None = None
    for ticket in waiting:
        fitting, possible = (r.fits(ticket.bundle, ticket.least) for r in (free, free.emptied()))
        if possible < ticket.least:
            text = f"{workers_text(ticket.least)} of {ticket.bundle}; all nodes together have room for {possible}"
            result[ticket.name] = Admission(False, waits_for=text, possible=False)
            continue
        if first is not None:
            result[ticket.name] = Admission(False, waits_for=f"{first.short} comes first")
            continue
        if fitting >= ticket.least:
            addresses_by_job[ticket.name] = free.take(ticket.bundle, ticket.most)
            result[ticket.name] = Admission(True, ticket.most)
            running = [*running, ticket]
            continue
        first = ticket
        result[ticket.name] = Admission(False, waits_for=_waits_for(ticket, fitting, running))
    lower = [] if first is None else [t for t in running if t.priority < first.priority]
    lower.sort(key=lambda t: (t.priority, -t.since))
    victims = [] if first is None else _victims(first, free, lower, addresses_by_job)
    for ticket in running:
        yields = first.short if first is not None and ticket in victims else ""
        # While a job waits, no other may grow.
        max_workers = len(ticket.places) if first is not None and ticket.places else ticket.most
        result[ticket.name] = Admission(True, max_workers, yield_to=yields)
    return result


def _victims(
    first: QueuedJob,
    free: _FreeCapacity,
    lower: Sequence[QueuedJob],
    addresses_by_job: dict[str, tuple[str, ...]],
) -> list[QueuedJob]:
    """The jobs that must yield so that `first` fits; empty if it would not fit even without all of `lower`.

    They are taken from `lower` in order. Those whose end turns out to be unnecessary are dropped again.
    """

    def suffices(victims: Sequence[QueuedJob]) -> bool:
        freed = _FreeCapacity(free.nodes)
        for ticket in victims:
            freed.give(ticket.bundle, addresses_by_job[ticket.name])
        return freed.fits(first.bundle, first.least) >= first.least

    victims = next((list(lower[:count]) for count in range(1, len(lower) + 1) if suffices(lower[:count])), [])
    for ticket in reversed(victims):
        others = [other for other in victims if other is not ticket]
        victims = others if suffices(others) else victims
    return victims


def _waits_for(ticket: QueuedJob, fitting: int, running: Sequence[QueuedJob]) -> str:
    """The message about what the first job in line waits for."""
    others = ", ".join(sorted(t.short for t in running)) or "nobody"
    return f"{workers_text(ticket.least)} of {ticket.bundle}; there is room for {fitting}; running: {others}"

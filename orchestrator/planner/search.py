"""The fastest of the layouts that are legal and fit, found by bounds: best first, what a bound rules out is passed
over, which cannot lose the best. Torch-free and ray-free."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.config.object_reference import ObjectReference
from orchestrator.parallel.cuts import layers_by_rank
from orchestrator.parallel.layout import SPLIT, Layout, ModelShape
from orchestrator.planner.candidates import Degrees, Family
from orchestrator.planner.device import Machine
from orchestrator.planner.own_cost import Refusal, with_own
from orchestrator.planner.simulation.operators import Program, ends
from orchestrator.planner.simulation.step import (
    StepTime,
    busiest,
    inner_layer,
    parts_of,
    step_time,
    with_update,
)


def passes_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> float:
    """A bound from below on the seconds of a step's passes, cheap to compute. In a pipeline the last rank waits for the
    first forward pass of those before it and is followed by their last backward pass, and no rank is faster than its
    own work."""
    return max(_busy_and_filled(shape, layout, global_batch, machine, program))


def _busy_and_filled(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> tuple[float, float]:
    """Seconds of the busiest rank's work, and those of the last one of a pipeline with its fill."""
    machine, parts = machine.among(layout.world), max(layout.accumulation(global_batch), 1)
    filled = 0.0 if layout.pp == 1 else _filled(shape, layout, parts, machine, program)
    return parts * busiest(shape, layout, machine, program), filled


def _filled(shape: ModelShape, layout: Layout, parts: int, machine: Machine, program: Program) -> float:
    """Seconds until the last rank of a pipeline can begin, of its work, and after its end."""
    inner = inner_layer(shape, layout, machine, program)
    each = inner.compute + inner.sent
    last = layers_by_rank(shape.layers, layout)[-1]
    ahead, _ = layout.layers_of(shape.layers, layout.pp - 1)
    if layout.schedule == "zbv":
        # its last rank has the stages in the middle; only inputs' gradients have a way back
        way = ahead * (inner.forward + inner.sent_forward) + parts * last * each
        back = ahead * (inner.inputs + inner.again + inner.sent_backward) - parts * last * inner.weights
        return way + max(back, 0.0)
    _, head = ends(shape, machine, program, parts_of(layout))
    # the weights' gradients may be what the last rank ends with, while the backward pass has gone on
    way = inner.forward + inner.sent_forward if layout.schedule in SPLIT else each
    return ahead * way + parts * (last * each + head.compute + head.sent)


def least_passes_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> float:
    """A bound from below that is rougher still: what all ranks of a pipeline compute and send, evenly divided. It is
    that of every cut, of every schedule, and of every smaller micro-batch, of which a sample takes no less."""
    machine = machine.among(layout.world)
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, parts_of(layout))
    each = shape.layers * (inner.compute + inner.sent) + sum(end.compute + end.sent for end in (first, head))
    return max(layout.accumulation(global_batch), 1) * each / layout.pp


def least_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> float:
    """A bound from below on the seconds of a step, cheap to compute, by which a search passes over layouts; exact
    without a pipeline."""
    if layout.pp == 1:
        return step_time(shape, layout, global_batch, machine, program).seconds
    busy, filled = _busy_and_filled(shape, layout, global_batch, machine, program)
    machine, parts = machine.among(layout.world), max(layout.accumulation(global_batch), 1)
    inner = inner_layer(shape, layout, machine, program)
    sent = parts * max(layers_by_rank(shape.layers, layout)) * inner.sent
    return with_update(
        shape, layout, parts, machine, program, (busy - sent, sent, max(filled - busy, 0.0))
    ).seconds


BEST = 10
"""How many layouts are predicted in full at least, where as many are legal."""
TIE = 0.05
"""Share of the step's time within which two layouts count as equally fast: predictions are no better than that."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction: memory in bytes of the rank that needs most, and the step's time by part."""

    layout: Layout
    memory: float
    time: StepTime

    @property
    def seconds(self) -> float:
        """Predicted seconds per step."""
        return self.time.seconds

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain data."""
        return {
            "layout": str(self.layout),
            "memory_bytes": round(self.memory),
            "step_seconds": round(self.seconds, 4),
        }


class Search:
    """The fastest layouts, in the order of what bounds their times from below: first that of all with the same degrees,
    then those of their families, then those of their layouts. When a bound is above the times of the BEST so far, so
    are all that follow.

    Attributes:
        refused: what the user's `own` cost refuses, each with its reason.
    """

    def __init__(
        self, shape: ModelShape, batch: int, machine: Machine, program: Program, own: ObjectReference | None
    ) -> None:
        self.refused: list[tuple[Layout, str]] = []
        self._of, self._own = (shape, batch, machine, program), own
        self._queue: list[tuple[float, int, Degrees | Family | tuple[Layout, float]]] = []
        self._number = itertools.count()
        self._found: list[Candidate] = []
        self._times: list[float] = []

    @property
    def passed_over(self) -> int:
        """How many legal layouts were not predicted in full; those of families that were not looked at do not count."""
        return sum(isinstance(each, tuple) for _, _, each in self._queue)

    def add(self, degrees: Degrees) -> None:
        """Degrees to look at."""
        shape, batch, machine, program = self._of
        self._push(least_passes_time(shape, degrees.least, batch, machine, program), degrees)

    def _add_family(self, family: Family) -> None:
        shape, batch, machine, program = self._of
        self._push(min(passes_time(shape, least, batch, machine, program) for least in family.least), family)

    def add_legal(self, layouts: list[tuple[Layout, float]]) -> None:
        """Layouts that are legal, with the memory that they need."""
        shape, batch, machine, program = self._of
        for layout, memory in layouts:
            self._push(least_time(shape, layout, batch, machine, program), (layout, memory))

    def _push(self, bound: float, one: Degrees | Family | tuple[Layout, float]) -> None:
        heapq.heappush(self._queue, (bound, next(self._number), one))

    def best(
        self,
        possible_of: Callable[[Degrees], Iterator[Family]],
        legal_of: Callable[[Family], list[tuple[Layout, float]]],
    ) -> list[Candidate]:
        """The fastest layouts in order, but first, of those that are equally fast as the first, that with least
        sharding."""
        shape, batch, machine, program = self._of
        found, times = self._found, self._times
        while self._queue:
            bound, _, one = self._queue[0]
            if len(times) >= BEST and bound > max(times[BEST - 1], times[0] * (1.0 + TIE)):
                break
            heapq.heappop(self._queue)
            if isinstance(one, Degrees):
                for family in possible_of(one):
                    self._add_family(family)
                continue
            if isinstance(one, Family):
                self.add_legal(legal_of(one))
                continue
            layout, memory = one
            time = with_own(self._own, layout, step_time(shape, layout, batch, machine, program), memory)
            if isinstance(time, Refusal):
                self.refused.append((layout, time.reason))
                continue
            found.append(Candidate(layout, memory, time))
            times[:] = sorted([*times, found[-1].seconds])[:BEST]
        if not found:
            return []
        found.sort(key=lambda c: (c.seconds, c.layout.zero, c.memory))
        equal = [c for c in found if c.seconds <= times[0] * (1.0 + TIE)]
        first = min(equal, key=lambda c: (c.layout.zero, c.layout.engine != "torch", c.seconds, c.memory))
        found.remove(first)
        return [first, *found]

"""Best-first search for the fastest legal layout that fits. Torch-free and ray-free.

Each set of layouts has a lower bound on its step time that is cheap to compute. The search expands the set with the
lowest bound first, and stops when every remaining bound exceeds the times found. It never loses the best layout.
"""

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
from orchestrator.planner.own_cost import Refusal, with_own_cost
from orchestrator.planner.simulation.operators import Program, ends
from orchestrator.planner.simulation.step import (
    StepTime,
    busiest,
    in_mean_rows,
    inner_layer,
    layer_part,
    step_time,
    with_update,
)


def passes_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> float:
    """Return a lower bound on the seconds of a step's passes.

    It is max(work of the busiest rank, fill + work of the last rank + drain): the last rank of a pipeline waits for
    the first forward pass of the ranks before it, and their last backward pass follows it. Rows count as in
    micro-batches of one row, where they are shortest.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        global_batch: samples of a step.
        machine: one worker.
        program: how the engine computes.
    """
    return max(_busy_and_filled(in_mean_rows(shape, layout, rows=1), layout, global_batch, machine, program))


def _busy_and_filled(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> tuple[float, float]:
    """Return the seconds of the busiest rank's work, and those of a pipeline's last rank with fill and drain."""
    machine = machine.among(layout.world)
    parts = max(layout.accumulation(global_batch), 1)
    filled = 0.0 if layout.pp == 1 else _filled(shape, layout, parts, machine, program)
    return parts * busiest(shape, layout, machine, program), filled


def _filled(shape: ModelShape, layout: Layout, parts: int, machine: Machine, program: Program) -> float:
    """Return the seconds until the last rank of a pipeline can begin, plus its work, plus those after its end."""
    inner = inner_layer(shape, layout, machine, program)
    layer_seconds = inner.compute + inner.sent
    last = layers_by_rank(shape.layers, layout)[-1]
    layers_before, _ = layout.layers_of(shape.layers, layout.pp - 1)
    if layout.schedule == "zbv":
        # The last rank has the two stages at the tip of the V, and only I must travel back up.
        fill = layers_before * (inner.forward + inner.sent_forward) + parts * last * layer_seconds
        drain = (
            layers_before * (inner.inputs + inner.recompute + inner.sent_backward)
            - parts * last * inner.weights
        )
        return fill + max(drain, 0.0)
    _, head = ends(shape, machine, program, layer_part(layout))
    # With a split backward pass the last rank may end with W while the ranks before it are done, so only the forward
    # half of the way counts.
    fill = inner.forward + inner.sent_forward if layout.schedule in SPLIT else layer_seconds
    return layers_before * fill + parts * (last * layer_seconds + head.compute + head.sent)


def passes_lower_bound(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> float:
    """Return a rougher lower bound: the work of all ranks of a pipeline, divided evenly.

    seconds = micro-batches x (layers x layer + embedding + head) / p. It holds for every cut, every schedule, and every
    smaller micro-batch, because a row of the same length takes no less time in a smaller micro-batch. Rows count as in
    micro-batches of one row, where they are shortest.

    Args:
        shape: the sizes of the model.
        layout: gives the degrees and the largest micro-batch.
        global_batch: samples of a step.
        machine: one worker.
        program: how the engine computes.
    """
    machine = machine.among(layout.world)
    shape = in_mean_rows(shape, layout, rows=1)
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, layer_part(layout))
    stage_seconds = shape.layers * (inner.compute + inner.sent) + sum(
        end.compute + end.sent for end in (first, head)
    )
    return max(layout.accumulation(global_batch), 1) * stage_seconds / layout.pp


def time_lower_bound(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> float:
    """Return a lower bound on the seconds of a step. It is exact without a pipeline.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        global_batch: samples of a step.
        machine: one worker.
        program: how the engine computes.
    """
    if layout.pp == 1:
        return step_time(shape, layout, global_batch, machine, program).seconds
    busy, filled = _busy_and_filled(shape, layout, global_batch, machine, program)
    machine = machine.among(layout.world)
    parts = max(layout.accumulation(global_batch), 1)
    inner = inner_layer(shape, layout, machine, program)
    sent = parts * max(layers_by_rank(shape.layers, layout)) * inner.sent
    # (compute, communication, bubble): the bubble is at least what fill and drain take beyond the busiest rank's work.
    passes = (busy - sent, sent, max(filled - busy, 0.0))
    return with_update(
        shape, layout, micro_batches=parts, machine=machine, program=program, passes=passes
    ).seconds


MIN_CANDIDATES = 10
"""Minimum number of layouts that are predicted in full, if that many are legal."""
TIE = 0.05
"""Relative difference of step times within which two layouts count as equally fast: predictions are no more precise."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction.

    Attributes:
        layout: the layout.
        memory: bytes of the rank that needs most.
        time: the step's time by part.
    """

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
    """A queue of sets of layouts, ordered by the lower bound of their step times.

    The sets are nested: all layouts with the same degrees, families of them, single layouts. Expanding a set replaces
    it by its parts with their own, higher bounds. When the lowest bound exceeds the times of the fastest
    MIN_CANDIDATES layouts so far, so do all others.

    Attributes:
        refused: layouts that the user's own cost refuses, each with the reason.
    """

    def __init__(
        self,
        shape: ModelShape,
        batch: int,
        machine: Machine,
        program: Program,
        own_cost: ObjectReference | None,
    ) -> None:
        self.refused: list[tuple[Layout, str]] = []
        self._inputs = (shape, batch, machine, program)
        self._own_cost = own_cost
        self._queue: list[tuple[float, int, Degrees | Family | tuple[Layout, float]]] = []
        self._number = itertools.count()  # order of equal bounds
        self._candidates: list[Candidate] = []
        self._times: list[float] = []  # seconds of the MIN_CANDIDATES fastest candidates, ascending

    @property
    def passed_over(self) -> int:
        """Number of legal layouts that were not predicted in full, without those of families that were not expanded."""
        return sum(isinstance(entry, tuple) for _, _, entry in self._queue)

    def add(self, degrees: Degrees) -> None:
        """Add degrees to the search."""
        shape, batch, machine, program = self._inputs
        self._push(passes_lower_bound(shape, degrees.fastest, batch, machine, program), degrees)

    def _add_family(self, family: Family) -> None:
        shape, batch, machine, program = self._inputs
        self._push(
            min(passes_time(shape, layout, batch, machine, program) for layout in family.fastest), family
        )

    def add_legal(self, layouts: list[tuple[Layout, float]]) -> None:
        """Add legal layouts, each with the bytes that it needs."""
        shape, batch, machine, program = self._inputs
        for layout, memory in layouts:
            self._push(time_lower_bound(shape, layout, batch, machine, program), (layout, memory))

    def _push(self, bound: float, entry: Degrees | Family | tuple[Layout, float]) -> None:
        heapq.heappush(self._queue, (bound, next(self._number), entry))

    def best(
        self,
        possible_of: Callable[[Degrees], Iterator[Family]],
        legal_of: Callable[[Family], list[tuple[Layout, float]]],
    ) -> list[Candidate]:
        """Run the search; return the candidates, fastest first.

        One exception: of the layouts that are as fast as the fastest within TIE, the one with the lowest ZeRO stage
        comes first.

        Args:
            possible_of: yields the families of layouts with given degrees.
            legal_of: returns the legal layouts of a family, each with the bytes that it needs.
        """
        shape, batch, machine, program = self._inputs
        candidates = self._candidates
        times = self._times
        while self._queue:
            bound, _, entry = self._queue[0]
            if len(times) >= MIN_CANDIDATES and bound > max(
                times[MIN_CANDIDATES - 1], times[0] * (1.0 + TIE)
            ):
                break
            heapq.heappop(self._queue)
            if isinstance(entry, Degrees):
                for family in possible_of(entry):
                    self._add_family(family)
                continue
            if isinstance(entry, Family):
                self.add_legal(legal_of(entry))
                continue
            layout, memory = entry
            time = with_own_cost(
                self._own_cost, layout, step_time(shape, layout, batch, machine, program), memory
            )
            if isinstance(time, Refusal):
                self.refused.append((layout, time.reason))
                continue
            candidates.append(Candidate(layout, memory, time))
            times[:] = sorted([*times, candidates[-1].seconds])[:MIN_CANDIDATES]
        if not candidates:
            return []
        candidates.sort(key=lambda c: (c.seconds, c.layout.zero, c.memory))
        equal = [c for c in candidates if c.seconds <= times[0] * (1.0 + TIE)]
        first = min(equal, key=lambda c: (c.layout.zero, c.layout.engine != "torch", c.seconds, c.memory))
        candidates.remove(first)
        return [first, *candidates]

"""The plan: enumerate layouts, reject the illegal ones with a reason, predict memory and time, choose the best.

`memory` predicts memory and `simulation` time. `search` skips layouts that a lower bound on their time rules out, which
never loses the best one. Torch-free and ray-free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from orchestrator.parallel.config import cost_of
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.candidates import Degrees, Family, LayoutEstimates, all_degrees
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import (
    MEMORY_SHARE,
    fits,
    needed_bytes,
    offloaded_bytes,
    peak_by_stage,
    peak_bytes,
)
from orchestrator.planner.no_layout import memory_text, no_layout
from orchestrator.planner.own_cost import Refusal, with_own_cost
from orchestrator.planner.search import TIE, Candidate, Search
from orchestrator.planner.simulation.step import (
    ends_in_layers,
    mean_row,
    saved_bytes,
    step_seconds_quantile,
    step_time,
)

QUANTILE_SHARES = (0.05, 0.5, 0.95)
"""Shares of steps for which the plan gives an upper limit on their seconds."""
NO_VERDICTS: Mapping[Layout, Verdict] = MappingProxyType({})


@dataclass(frozen=True)
class Verdict:
    """The result of tracing a layout, which overrides the formula.

    Attributes:
        reason: why the layout is rejected; empty if it fits.
        ratio: traced memory / memory by the formula.
    """

    reason: str
    ratio: float


@dataclass(frozen=True)
class Plan:
    """The chosen layout and the alternatives.

    Attributes:
        chosen: the chosen layout with its prediction.
        candidates: the best layouts in order, the chosen one included.
        rejected: the rejected layouts, each with the reason.
        machine: one worker.
        tokens: tokens per step.
        by_stage: the chosen layout's bytes of tensors at each index of the pipeline axis.
        needed: the same, with the memory of a process besides its tensors.
        row_tokens: mean tokens of a row that is cut to the samples of its micro-batch, under the chosen layout; None if
            rows have the full length, or if the lengths of the samples are unknown. `tokens` and the memory are of full
            rows.
        on_cpu: whether the job runs on CPUs, where copies share the memory of tensors.
        passed_over: number of legal layouts that were not predicted in full, because they cannot be among the best.
            Layouts that degrees, schedule and micro-batch rule out are not counted.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[Layout, str], ...]
    machine: Machine
    tokens: int
    by_stage: tuple[float, ...] = ()
    needed: tuple[float, ...] = ()
    row_tokens: float | None = None
    on_cpu: bool = False
    passed_over: int = 0

    @property
    def fits(self) -> bool:
        """Whether the chosen layout is predicted to fit the machine's memory."""
        return self.chosen.memory <= self.machine.memory * MEMORY_SHARE

    @property
    def quantiles(self) -> dict[str, float]:
        """Upper limit on the seconds of a share of the steps, by that share."""
        chosen = self.chosen
        return {
            str(share): step_seconds_quantile(chosen.time, chosen.layout.world, self.machine, share)
            for share in QUANTILE_SHARES
        }

    def _by_rank(self, by_stage: tuple[float, ...]) -> list[int]:
        layout = self.chosen.layout
        return [round(size) for size in by_stage for _ in range(layout.world // layout.pp)]

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json. Memory is that of the closed formula."""
        seconds = self.chosen.seconds
        layout = self.chosen.layout
        return {
            "chosen": layout.to_json() | {"text": str(layout)},
            "predicted": {
                "memory_bytes": round(max(self.needed)),
                "fits": fits(max(self.needed), self.machine, self.on_cpu),
                "step_seconds": seconds,
                "step_seconds_quantiles": self.quantiles,
                "tokens_per_second": self.tokens / seconds,
                "seconds_by_part": self.chosen.time.to_json(),
                "peak_bytes_by_rank": self._by_rank(self.by_stage),
                "memory_bytes_by_rank": self._by_rank(self.needed),
                **({"row_tokens": round(self.row_tokens, 1)} if self.row_tokens else {}),
            },
            "machine": {
                "name": self.machine.name,
                "memory_bytes": round(self.machine.memory),
                "flops_per_second": round(self.machine.flops),
            },
            "candidates": [c.to_json() for c in self.candidates],
            "passed_over": self.passed_over,
            "rejected": [{"layout": str(layout), "reason": reason} for layout, reason in self.rejected],
        }


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn off the garbage collector within the context.

    A plan creates no reference cycles, and searching hundreds of thousands of layouts for them takes a fifth of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def plan(
    demand: Demand,
    shape: ModelShape,
    workers: int,
    machine: Machine,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NO_VERDICTS,
) -> Plan:
    """Return the fastest legal layout that fits on at most `workers` ranks.

    A searched layout uses at least `workers.min` ranks if that many exist. A traced layout that fits rules out
    layouts on no more ranks that were not traced. `planner.planned` applies the job's objective.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        workers: maximum number of ranks.
        machine: one worker.
        must_fit: whether a layout must fit. Otherwise, or if the job says so, the layout that needs least memory is
            returned when none fits.
        verdicts: results of traces, which override the formula. If a traced layout does not fit, the formula is
            corrected by the same factor for all layouts with its degrees.

    Raises:
        InputError: if the layout that the job gives is illegal, or if no layout is legal and fits, with the reason.
    """
    min_workers = demand.resources.workers.min
    sorter = _Sorter(
        demand,
        shape,
        workers,
        machine=machine,
        verdicts=verdicts,
        min_world=min_workers if demand.searches_layout and min_workers <= workers else 1,
    )
    batch = demand.batch
    program = demand.program
    estimates = LayoutEstimates(
        lambda layout: sorter.bytes_of(layout) / sorter.offered,
        lambda layout: ends_in_layers(shape, layout, machine, program),
    )
    impossible: list[tuple[Layout, str]] = []
    search = Search(shape, batch, machine, program, cost_of(demand.parallel))

    def legal_families(degrees: Degrees) -> Iterator[Family]:
        for family in degrees.families():
            if problems := family.fastest[0].problems(shape, batch):
                impossible.append((family.fastest[0], problems[0]))
            else:
                yield family

    # It may be in no searched family; `legal_layouts` leaves it out, so that it counts once.
    if sorter.widest_traced is not None:
        search.add_legal([(sorter.widest_traced, sorter.traced_size(sorter.widest_traced))])
    for degrees in all_degrees(
        demand,
        shape,
        workers=workers,
        per_node=machine.per_node,
        reject=sorter.rejected.append,
        estimates=estimates,
    ):
        search.add(degrees)
    best = search.best(legal_families, sorter.legal_layouts)
    if sorter.large and not best and not (must_fit and demand.resources.must_fit):
        search.add_legal(sorter.take_smallest())
        best = search.best(legal_families, sorter.legal_layouts)
    rejected = [
        *sorter.rejected,
        # Late, because a refusal names the first reason: problems of layouts that the model can have come before.
        *impossible,
        *((layout, f"needs {memory_text(memory, sorter.offered)}") for layout, memory in sorter.large),
        *search.refused,
        *((layout, f"uses fewer than the {min_workers} workers of workers.min") for layout in sorter.narrow),
    ]
    if not best:
        raise no_layout(
            demand,
            shape,
            workers=workers,
            rejected=search.refused or rejected,
            large=[] if search.refused else sorter.large,
            offered=sorter.offered,
            narrow=max(sorter.narrow, key=lambda layout: layout.world, default=None),
        )
    layout = best[0].layout
    on_cpu = not demand.resources.per_worker.gpu
    by_stage = tuple(peak_by_stage(demand, shape, layout))
    saved = saved_bytes(shape, layout, program.optimizer)
    return Plan(
        chosen=best[0],
        candidates=tuple(best),
        rejected=tuple(rejected),
        machine=machine,
        tokens=batch * shape.sequence_length,
        by_stage=by_stage,
        needed=tuple(needed_bytes(layout, tensors, saved, on_cpu) for tensors in by_stage),
        row_tokens=mean if (mean := mean_row(shape, layout)) < shape.sequence_length else None,
        on_cpu=on_cpu,
        passed_over=search.passed_over,
    )


class _Sorter:
    """Sorts layouts into legal ones, and those that are rejected, too large or too narrow.

    Attributes:
        rejected: the rejected layouts, each with the reason.
        large: layouts that need more than the machine offers, each with the bytes that it needs.
        narrow: layouts on fewer than `min_world` ranks.
        offered: bytes of a worker that tensors may use.
        widest_traced: the widest traced layout that fits, None without one.
    """

    def __init__(
        self,
        demand: Demand,
        shape: ModelShape,
        workers: int,
        *,
        machine: Machine,
        verdicts: Mapping[Layout, Verdict],
        min_world: int,
    ) -> None:
        self.rejected: list[tuple[Layout, str]] = []
        self.large: list[tuple[Layout, float]] = []
        self.narrow: list[Layout] = []
        self.offered = machine.memory * MEMORY_SHARE
        self._demand = demand
        self._shape = shape
        self._workers = workers
        self._machine = machine
        self._verdicts = verdicts
        self._min_world = min_world
        self._sizes: dict[Layout, float] = {}
        self._factors: dict[tuple[int, ...], float] = {}
        """Traced memory / memory by the formula, by the degrees of a traced layout that does not fit."""
        for layout, verdict in verdicts.items():
            if verdict.reason:
                degrees = _degrees(layout)
                self._factors[degrees] = max(self._factors.get(degrees, 1.0), verdict.ratio)
        traced = [
            layout
            for layout, verdict in verdicts.items()
            if not verdict.reason and layout.world >= min_world and not self._problem(layout)
        ]
        self.widest_traced = max(traced, key=lambda layout: layout.world, default=None)

    def bytes_of(self, layout: Layout) -> float:
        """Return the bytes of a rank by the formula, corrected by the traces of layouts with the same degrees."""
        size = self._sizes.get(layout)
        if size is None:
            size = peak_bytes(self._demand, self._shape, layout)
            if self._factors:
                size *= self._factors.get(_degrees(layout), 1.0)
            self._sizes[layout] = size
        return size

    def traced_size(self, layout: Layout) -> float:
        """Return the bytes of a rank under a traced layout."""
        return self._verdicts[layout].ratio * peak_bytes(self._demand, self._shape, layout)

    def legal_layouts(self, family: Family) -> list[tuple[Layout, float]]:
        """Return the legal layouts of a family, each with its bytes, and note why the others are not."""
        legal = []
        for layout in family.layouts():
            if problem := self._problem(layout):
                self.rejected.append((layout, problem))
            elif layout.world < self._min_world:
                self.narrow.append(layout)
            elif self._verdicts and (verdict := self._verdicts.get(layout)) is not None:
                if verdict.reason:
                    self.rejected.append((layout, verdict.reason))
                elif layout != self.widest_traced:
                    legal.append((layout, self.traced_size(layout)))
            elif (memory := self.bytes_of(layout)) > self.offered:
                self.large.append((layout, memory))
            elif self.widest_traced is not None and layout.world <= self.widest_traced.world:
                reason = f"has no trace, and {self.widest_traced} fits by its trace"
                self.rejected.append((layout, reason))
            else:
                # The correction decides whether a layout fits; a plan shows the bytes of the formula.
                bytes_by_formula = peak_bytes(self._demand, self._shape, layout) if self._factors else memory
                legal.append((layout, bytes_by_formula))
        return legal

    def take_smallest(self) -> list[tuple[Layout, float]]:
        """Return the layouts that need the least memory, and remove them from `large`."""
        lowest = min(memory for _, memory in self.large) * (1.0 + TIE)
        smallest = [pair for pair in self.large if pair[1] <= lowest]
        self.large = [pair for pair in self.large if pair[1] > lowest]
        return smallest

    def _problem(self, layout: Layout) -> str:
        """Return why the job cannot run under the layout, apart from the device's memory; empty if it can."""
        demand = self._demand
        if problems := layout.problems(self._shape, demand.batch) or demand.engine_problems(layout):
            return problems[0]
        if layout.world > self._workers:
            return f"{layout} needs {layout.world} workers of {self._workers}; lower a degree or add workers"
        offloaded = offloaded_bytes(demand.program.optimizer, self._shape, layout)
        host = self._machine.host_memory
        if offloaded > host:
            return (
                f"offload {layout.offload} puts {offloaded / 2**30:.0f} GiB of a rank into its host's memory, of "
                f"which a worker has {host / 2**30:.0f} GiB; add workers, or set offload to none"
            )
        return ""


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.cp, layout.tp, layout.ep, layout.zero


def predict(demand: Demand, shape: ModelShape, layout: Layout, machine: Machine) -> Candidate:
    """Predict the bytes per rank and the seconds per step of a layout.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the model.
        layout: the layout.
        machine: the device and its links.
    """
    memory = peak_bytes(demand, shape, layout)
    time = step_time(shape, layout, demand.batch, machine, demand.program)
    costed = with_own_cost(cost_of(demand.parallel), layout, time, memory)
    return Candidate(layout, memory, time if isinstance(costed, Refusal) else costed)

"""The plan: enumerate layouts, reject the illegal ones with a reason, predict memory and time, choose the best.

Memory is of `memory`, time of `simulation`. The search passes over what a bound from below on the time rules out, which
cannot lose the best. Torch-free and ray-free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from orchestrator.config.parallel import cost_of
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.candidates import Degrees, Family, Room, all_degrees
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import (
    MEMORY_SHARE,
    fits,
    needed_bytes,
    offloaded_bytes,
    peak_by_stage,
    peak_bytes,
)
from orchestrator.planner.no_layout import needs, no_layout
from orchestrator.planner.own_cost import Refusal, with_own
from orchestrator.planner.search import TIE, Candidate, Search
from orchestrator.planner.simulation.operators import Program
from orchestrator.planner.simulation.step import (
    ends_in_layers,
    in_share_of_steps,
    saved_bytes,
    step_time,
)

SHARES = (0.05, 0.5, 0.95)
"""Of the steps, for which it is told what they take at most."""
NOTHING: Mapping[Layout, Verdict] = MappingProxyType({})


@dataclass(frozen=True)
class Verdict:
    """What the trace of a layout says, whatever the formula does: the `reason` why it is not taken, empty if it fits,
    and how many `times` as much as the formula says it needs."""

    reason: str
    times: float


@dataclass(frozen=True)
class Plan:
    """The chosen layout, the best ones in order, the rejected ones with a reason, and tokens per step.

    passed_over: how many legal layouts were found and not predicted in full, since they cannot be among the best. What
        cannot because of its degrees, schedule and micro-batch alone was not looked at.
    by_stage: the chosen layout's bytes of tensors at each index of the pipeline axis.
    needed: the same with what a process takes beside its tensors, `on_cpu` that is all in one memory.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[Layout, str], ...]
    machine: Machine
    tokens: int
    by_stage: tuple[float, ...] = ()
    needed: tuple[float, ...] = ()
    on_cpu: bool = False
    passed_over: int = 0

    @property
    def fits(self) -> bool:
        """Whether the chosen layout is predicted to fit the machine's memory."""
        return self.chosen.memory <= self.machine.memory * MEMORY_SHARE

    @property
    def quantiles(self) -> dict[str, float]:
        """Seconds that a step takes at most in a share of the steps, by that share."""
        chosen = self.chosen
        return {
            str(share): in_share_of_steps(chosen.time, chosen.layout.world, self.machine, share)
            for share in SHARES
        }

    def _by_rank(self, by_stage: tuple[float, ...]) -> list[int]:
        layout = self.chosen.layout
        return [round(size) for size in by_stage for _ in range(layout.world // layout.pp)]

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json. Memory is that of the closed formula."""
        seconds, layout = self.chosen.seconds, self.chosen.layout
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
def _uncollected() -> Iterator[None]:
    """Without the search for cycles: a plan makes none, and among hundreds of thousands of layouts it takes a fifth
    of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def plan(
    spec: JobSpec,
    shape: ModelShape,
    workers: int,
    machine: Machine,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NOTHING,
) -> Plan:
    """The fastest legal layout on at most `workers` ranks that fits; without `must_fit`, or where the job says so, that
    which needs least memory if none does. Of those that are searched it uses as many ranks as the job wants at least,
    if there are so many. What the job's objective asks for, `planner.planned` says. Of traced
    ones the `verdicts` count; where they do not fit, the formula is taken to be off by as much for all with their
    degrees. One that fits rules out those on no more ranks that were not traced.

    Raises InputError if a layout given by hand is illegal, or if none is legal and fits, with the reason.
    """
    offered = machine.memory * MEMORY_SHARE
    large: list[tuple[Layout, float]] = []
    rejected: list[tuple[Layout, str]] = []
    narrow: list[Layout] = []
    wanted = spec.resources.workers.min
    least_world = wanted if spec.searches_layout and wanted <= workers else 1
    batch, program = spec.train.global_batch, program_of(spec)
    sizes: dict[Layout, float] = {}
    off: dict[tuple[int, ...], float] = {}
    for layout, verdict in verdicts.items():
        if verdict.reason:
            off[_degrees(layout)] = max(off.get(_degrees(layout), 1.0), verdict.times)
    sure = [
        layout
        for layout, verdict in verdicts.items()
        if not verdict.reason
        and layout.world >= least_world
        and not _problem(spec, shape, layout, workers, machine)
    ]
    known = max(sure, key=lambda layout: layout.world, default=None)

    def size_of(layout: Layout) -> float:
        found = sizes.get(layout)
        if found is None:
            found = peak_bytes(spec, shape, layout)
            found = sizes[layout] = found * off.get(_degrees(layout), 1.0) if off else found
        return found

    def legal_of(family: Family) -> list[tuple[Layout, float]]:
        legal = []
        for layout in family.layouts():
            if problem := _problem(spec, shape, layout, workers, machine):
                rejected.append((layout, problem))
            elif layout.world < least_world:
                narrow.append(layout)
            elif verdicts and (verdict := verdicts.get(layout)) is not None:
                if verdict.reason:
                    rejected.append((layout, verdict.reason))
                elif layout != known:
                    legal.append((layout, verdict.times * peak_bytes(spec, shape, layout)))
            elif (memory := size_of(layout)) > offered:
                large.append((layout, memory))
            elif known is not None and layout.world <= known.world:
                rejected.append((layout, f"is not known to fit, as {known} is by its trace"))
            else:
                legal.append((layout, peak_bytes(spec, shape, layout) if off else memory))
        return legal

    room = Room(
        lambda layout: size_of(layout) / offered,
        lambda layout: ends_in_layers(shape, layout, machine, program),
    )
    impossible: list[tuple[Layout, str]] = []
    search = Search(shape, batch, machine, program, cost_of(spec.parallel))

    def possible_of(degrees: Degrees) -> Iterator[Family]:
        for family in degrees.families():
            if problems := family.least[0].problems(shape, batch):
                impossible.append((family.least[0], problems[0]))
            else:
                yield family

    if known is not None:
        search.add_legal([(known, verdicts[known].times * peak_bytes(spec, shape, known))])
    for degrees in all_degrees(spec, shape, workers, machine.per_node, rejected.append, room):
        search.add(degrees)
    best = search.best(possible_of, legal_of)
    if large and not best and not (must_fit and spec.resources.must_fit):
        least = min(memory for _, memory in large) * (1.0 + TIE)
        small, large = ([each for each in large if (each[1] <= least) is kept] for kept in (True, False))
        search.add_legal(small)
        best = search.best(possible_of, legal_of)
    rejected += impossible  # after what is wrong with layouts that the model can have: a refusal names the first reason
    for layout, memory in large:
        rejected.append((layout, f"needs {needs(memory, offered)}"))
    rejected += search.refused
    widest = max(narrow, key=lambda layout: layout.world, default=None)
    rejected += [(each, f"uses fewer than the {wanted} workers of workers.min") for each in narrow]
    if not best:
        raise no_layout(
            spec, shape, workers, search.refused or rejected, [] if search.refused else large, offered, widest
        )
    layout, on_cpu = best[0].layout, not spec.resources.per_worker.gpu
    by_stage, saved = tuple(peak_by_stage(spec, shape, layout)), saved_bytes(shape, layout, program.optimizer)
    return Plan(
        best[0],
        tuple(best),
        tuple(rejected),
        machine,
        batch * shape.sequence_length,
        by_stage,
        tuple(needed_bytes(layout, tensors, saved, on_cpu) for tensors in by_stage),
        on_cpu,
        search.passed_over,
    )


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.cp, layout.tp, layout.ep, layout.zero


def _problem(spec: JobSpec, shape: ModelShape, layout: Layout, workers: int, machine: Machine) -> str:
    """Why the job cannot run under the layout, memory of the device aside; empty if it can."""
    if problems := layout.problems(shape, spec.train.global_batch) or engine_problems(spec, layout):
        return problems[0]
    if layout.world > workers:
        return f"{layout} needs {layout.world} workers of {workers}; lower a degree or add workers"
    if (there := offloaded_bytes(spec, shape, layout)) > machine.host_memory:
        return (
            f"offload {layout.offload} puts {there / 2**30:.0f} GiB of a rank into its host's memory, of which a "
            f"worker has {machine.host_memory / 2**30:.0f} GiB; add workers, or set offload to none"
        )
    return ""


def predict(spec: JobSpec, shape: ModelShape, layout: Layout, machine: Machine) -> Candidate:
    """The predicted bytes per rank and seconds per step under `layout`."""
    memory = peak_bytes(spec, shape, layout)
    time = step_time(shape, layout, spec.train.global_batch, machine, program_of(spec))
    costed = with_own(cost_of(spec.parallel), layout, time, memory)
    return Candidate(layout, memory, time if isinstance(costed, Refusal) else costed)


def program_of(spec: JobSpec) -> Program:
    """How the engine computes this job's steps. ZeRO gathers weights and sums gradients in fp32."""
    return _program(
        4.0 if spec.train.dtype == "fp32" else 2.0,
        2 if spec.train.dtype == "fp8" else 0,
        spec.workload.dropouts[0] > 0,
        spec.workload.dropouts[1] > 0,
        spec.train.compile,
        spec.checkpoint.every,
        str(spec.train.optimizer.name),
        spec.train.reference == "held",
    )


@lru_cache
def _program(
    width: float,
    in_8_bits: int,
    dropout: bool,
    attention: bool,
    compiled: bool,
    commit_every: int,
    optimizer: str,
    reference: bool,
) -> Program:
    return Program(
        width,
        in_8_bits,
        dropout=dropout,
        attention_dropout=attention,
        compiled=compiled,
        products_again=float(compiled),
        commit_every=commit_every,
        optimizer=optimizer,
        reference=reference,
    )

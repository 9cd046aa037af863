"""The memory of a planned layout, measured by tracing the ranks that need most, within a time limit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.data.store.manifest import FORMAT
from orchestrator.parallel.layout import Layout, round_length
from orchestrator.planner.choose_layout import Plan, Verdict
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import (
    MEMORY_SHARE,
    early_teacher_bytes,
    fits,
    needed_bytes,
    offered,
    teacher_bytes,
)
from orchestrator.planner.no_layout import teacher_hint
from orchestrator.planner.planner import fits_with_margin, may_fit, planned
from orchestrator.planner.simulation.step import saved_bytes
from orchestrator.planner.step_trace import CATEGORIES, Memory, NotTraced, StepTrace
from orchestrator.planner.trace.layer_extrapolation import (
    extrapolated_depth,
    shallow_models,
    with_held_batches,
    with_micro_batches,
)
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data

if TYPE_CHECKING:
    from workloads.workload import Workload

END_RANKS = 2
"""Ranks at the ends of a pipeline, which are traced first."""
TRACE_SECONDS = 40.0
"""CPU seconds for the traces of a layout, and of the layouts tried in its place."""
LAST_TRACE_SECONDS = 20.0
"""Additional CPU seconds for the layout that needs least memory, if no other is known to fit."""


@dataclass(frozen=True)
class TracedMemory:
    """The memory of a layout's traced ranks. `saved`: bytes that an untraced rank copies for a commit."""

    layout: Layout
    ranks: tuple[StepTrace | NotTraced, ...]
    seconds: float
    saved: float = 0.0

    @property
    def traces(self) -> list[StepTrace]:
        """The traces that succeeded."""
        return [trace for trace in self.ranks if isinstance(trace, StepTrace)]

    @property
    def reasons(self) -> list[str]:
        """Why other traces failed, each reason once."""
        return list(dict.fromkeys(failure.reason for failure in self.ranks if isinstance(failure, NotTraced)))

    @property
    def largest(self) -> StepTrace | None:
        """The rank with the highest peak; None unless all were traced."""
        return None if self.reasons else max(self.traces, key=lambda trace: trace.memory.peak)

    def by_stage(self, formula: Sequence[float], bytes_of: Callable[[StepTrace], float]) -> list[int]:
        """Return `bytes_of` (trace) for each index of the pipeline axis.

        Between two traced ranks, the `formula` is corrected by its error at these two, interpolated linearly.

        Args:
            formula: bytes by the closed formula, by index of the pipeline axis.
            bytes_of: what to return of a trace.
        """
        by_index = {self.layout.coordinate(trace.rank)["pp"]: bytes_of(trace) for trace in self.traces}
        indices = sorted(by_index)
        result = []
        for index, predicted in enumerate(formula):
            # The first and the last index are always traced (`ranks_of`), so every index has traced ones on both sides.
            low = max(traced for traced in indices if traced <= index)
            high = min(traced for traced in indices if traced >= index)
            share = (index - low) / (high - low) if high > low else 0.0
            error = (1.0 - share) * (by_index[low] - formula[low]) + share * (by_index[high] - formula[high])
            result.append(round(predicted + error))
        return result

    def by_rank(self, formula: Sequence[float], bytes_of: Callable[[StepTrace], float]) -> list[int]:
        """Return the values for every rank; the ranks of a pipeline stage have equal ones.

        Args:
            formula: as in `by_stage`.
            bytes_of: as in `by_stage`.
        """
        ranks_per_stage = self.layout.world // self.layout.pp
        return [value for value in self.by_stage(formula, bytes_of) for _ in range(ranks_per_stage)]

    def peaks(self, formula: Sequence[float]) -> Sequence[float]:
        """Return the peak bytes of tensors at each index of the pipeline axis; the `formula` unless all were traced."""
        return formula if self.reasons else self.by_stage(formula, lambda trace: trace.memory.peak)

    def plan_json(self, plan: Plan, on_cpu: bool) -> dict[str, Any]:
        """Return the plan's JSON with the traced memory in place of the formula's, and with the formula's error.

        Args:
            plan: the plan by the formula.
            on_cpu: whether workers compute on CPUs.
        """
        document = plan.to_json()
        predicted, document["memory"] = self.replaced_memory(
            plan.by_stage, plan.chosen.memory, plan.machine, on_cpu
        )
        document["predicted"] |= predicted
        return document

    def replaced_memory(
        self, by_stage: Sequence[float], formula: float, machine: Machine, on_cpu: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what replaces the formula's entries in a plan's JSON: `predicted`, and `memory` with the formula's
        error.

        Args:
            by_stage: the formula's bytes by index of the pipeline axis.
            formula: its bytes of the largest rank.
            machine, on_cpu: the machine of a worker, and whether it computes on CPUs.
        """
        largest, memory = self.largest, self.to_json()
        if largest is None:
            if not self.traces:
                return {}, memory
            largest_needed = self.needed(formula, on_cpu)
            predicted: dict[str, Any] = {
                "memory_bytes": round(largest_needed),
                "fits": fits(largest_needed, machine, on_cpu),
            }
            return predicted, memory
        needed = self.by_rank(
            by_stage, lambda trace: needed_bytes(self.layout, trace.memory.peak, trace.saved, on_cpu)
        )
        predicted = {
            "memory_bytes": max(needed),
            "fits": fits(max(needed), machine, on_cpu),
            "peak_bytes_by_rank": self.by_rank(by_stage, lambda trace: trace.memory.peak),
            "memory_bytes_by_rank": needed,
        }
        error = formula / largest.memory.peak - 1.0
        return predicted, memory | {"formula_bytes": round(formula), "formula_error": error}

    def fits(self, plan: Plan, on_cpu: bool) -> bool:
        """Return whether the rank that needs most fits the plan's machine.

        Args:
            plan: the plan by the formula.
            on_cpu: whether workers compute on CPUs.
        """
        return fits(self.needed(plan.chosen.memory, on_cpu), plan.machine, on_cpu)

    def needed(self, formula: float, on_cpu: bool) -> float:
        """Return the bytes of the rank that needs most.

        If some ranks were not traced, it is the maximum over the traced ranks and the `formula`.

        Args:
            formula: bytes of the largest rank.
            on_cpu: whether workers compute on CPUs.
        """
        result = [(float(trace.memory.peak), float(trace.saved)) for trace in self.traces]
        result += [(formula, self.saved)] if self.reasons or not result else []
        return max(needed_bytes(self.layout, tensors, saved, on_cpu) for tensors, saved in result)

    def to_json(self) -> dict[str, Any]:
        """Return the part for plan.json: `ranks` with their bytes by category, and why ranks are missing."""
        return {
            "source": "formula" if self.reasons else "trace",
            "categories": list(CATEGORIES),
            "ranks": [trace.memory_json() | {"saved": trace.saved} for trace in self.traces],
            "not_traced": self.reasons,
            "seconds": round(self.seconds, 2),
        }


@dataclass(frozen=True)
class _TraceRequest:
    """A request for a trace. Requests with the same `key` and layout have the same answer."""

    key: tuple[str, ...]
    job: ResolvedJob = dataclasses.field(compare=False)
    layout: Layout
    seconds: float = dataclasses.field(compare=False)


class _NotCached(Exception):
    """Carries a result that another trace might improve, past the cache of `_cached`."""

    def __init__(self, memory: TracedMemory) -> None:
        super().__init__()
        self.memory = memory


def traced_memory(job: ResolvedJob, layout: Layout, seconds: float = TRACE_SECONDS) -> TracedMemory:
    """Trace one rank of each pipeline stage that may need most, within `seconds` of CPU time.

    A deep model, and a pipeline with many micro-batches, are extrapolated from two smaller traces. Never fails: a rank
    that cannot be traced has the reason instead. Traces are cached in this process. Jobs that differ only in name,
    seed, number of steps or machine share them.

    Args:
        job: the job.
        layout: the layout to trace.
        seconds: limit on the CPU time of all ranks together.
    """
    if job.model.as_transformer is None or job.spec.own_code:
        # Files and the user's code may have changed since an earlier trace.
        return _trace(_TraceRequest((), job, layout, seconds))
    start = time.process_time()
    engine = dataclasses.replace(job.spec.engine, seed=0)
    train = engine.train if engine.train.thaw else engine.train.model_copy(update={"steps": 1})
    identity = (
        dataclasses.replace(engine, train=train),
        job.spec.workload,
        job.spec.data,
        job.model,
        job.shape,
    )
    try:
        memory = _cached(_TraceRequest(tuple(map(repr, identity)), job, layout, seconds))
    except _NotCached as result:
        return result.memory
    return dataclasses.replace(memory, seconds=time.process_time() - start)


@lru_cache(maxsize=256)
def _cached(request: _TraceRequest) -> TracedMemory:
    memory = _trace(request)
    if memory.reasons or len(memory.ranks) < len(ranks_of(request.layout)):
        raise _NotCached(memory)
    # only what is read of a trace: events and crests of many layouts would fill the memory
    ranks = tuple(
        dataclasses.replace(trace, events=(), operator_peaks=()) if isinstance(trace, StepTrace) else trace
        for trace in memory.ranks
    )
    return dataclasses.replace(memory, ranks=ranks)


def _trace(request: _TraceRequest) -> TracedMemory:
    # imports the whole engine, which most jobs do not need
    from orchestrator.planner.trace.step import traces

    job, layout, seconds = request.job, request.layout, request.seconds
    start = time.process_time()
    ranks = ranks_of(layout)
    shallow = shallow_models(job, layout)
    saved = saved_bytes(job.shape, layout, str(job.spec.train.optimizer.name))
    models = [shallow.shallow, shallow.deeper] if shallow else [job.model]
    try:
        vocabulary = vocabulary_before_data(job)
        workloads = [
            load_workload(
                spec=job.spec.workload,
                data=job.spec.data,
                train=job.spec.train,
                seed=job.spec.seed,
                vocabulary=vocabulary,
                data_format=FORMAT,
                model=model,
            )
            for model in models
        ]
    except InputError as error:
        return TracedMemory(layout, tuple(NotTraced(rank, str(error)) for rank in ranks), 0.0, saved)

    accumulation = layout.accumulation(job.spec.train.global_batch)
    on_cpu = not job.spec.resources.per_worker.gpu

    def traced(workload: Workload, rank: int, counts: Sequence[int]) -> list[StepTrace] | NotTraced:
        seconds_left = max(seconds - (time.process_time() - start), 0.0)
        return traces(
            job.spec.engine,
            workload,
            layout=layout,
            rank=rank,
            counts=counts,
            seconds=seconds_left,
            data=job.spec.data,
            draws=job.spec.workload.draws,
        )

    def trace_rank(rank: int) -> StepTrace | NotTraced:
        counts = micro_batches_of(layout, accumulation, layout.coordinate(rank)["pp"], on_cpu)
        shallow_traces = traced(workloads[0], rank, counts)
        if isinstance(shallow_traces, NotTraced) or shallow is None:
            return (
                shallow_traces
                if isinstance(shallow_traces, NotTraced)
                else with_all_micro_batches(shallow_traces, shallow_traces[0], counts, accumulation)
            )
        deeper_traces = traced(workloads[1], rank, counts[:1])
        if isinstance(deeper_traces, NotTraced):
            return deeper_traces
        return with_all_micro_batches(
            shallow_traces,
            extrapolated_depth(shallow_traces[0], deeper_traces[0], shallow.factor),
            counts,
            accumulation,
        )

    results: list[StepTrace | NotTraced] = []
    for rank in ranks:
        spent = time.process_time() - start
        if len(results) >= END_RANKS and spent + spent / len(results) > seconds:
            break  # ranks between the ends are interpolated
        results.append(trace_rank(rank))
    teacher_size = round(teacher_bytes(job.spec.train.dtype, job.shape, layout, accumulation))
    early_size = round(early_teacher_bytes(demand_of(job.spec), job.shape, layout))
    results = [
        result
        if isinstance(result, NotTraced)
        else with_early_teacher(with_teacher(result, teacher_size), early_size)
        for result in results
    ]
    return TracedMemory(layout, tuple(results), time.process_time() - start, saved)


def with_teacher(trace: StepTrace, count: int) -> StepTrace:
    """Return a trace with `count` bytes more of weights, those of a teacher that was not traced.

    Args:
        trace: of the student.
        count: bytes of the teacher.
    """
    if not count:
        return trace
    memory = trace.memory
    at_peak, steady = (
        {**by_category, "weights": by_category["weights"] + count}
        for by_category in (memory.at_peak, memory.steady)
    )
    memory = dataclasses.replace(memory, peak=memory.peak + count, at_peak=at_peak, steady=steady)
    return dataclasses.replace(trace, memory=memory)


def with_early_teacher(trace: StepTrace, count: int) -> StepTrace:
    """Return a trace whose peak is before the first step, if a teacher then needs more than the step.

    Args:
        trace: of the student.
        count: bytes of the teacher and of its pass, beside the student's weights.
    """
    memory = trace.memory
    weights = memory.steady["weights"] + count
    if not count or weights <= memory.peak:
        return trace
    at_peak = {**dict.fromkeys(CATEGORIES, 0), "weights": weights}
    early = Memory(weights, at_peak, steady=memory.steady, phase="forward")
    return dataclasses.replace(trace, memory=early)


def with_all_micro_batches(
    traces: Sequence[StepTrace], first: StepTrace, counts: Sequence[int], accumulation: int
) -> StepTrace:
    """Return the trace `first`, of the first of the `counts`, extended to all micro-batches of a step.

    Args:
        traces: for each of `counts`, of the shallower model if there are two.
        first: of the whole model.
        counts: the traced numbers of micro-batches.
        accumulation: micro-batches of a rank in a step.
    """
    missing = accumulation - counts[0]
    if len(counts) == 1:
        return with_held_batches(first, missing)
    return with_micro_batches(first, traces[0], traces[1], missing / (counts[1] - counts[0]))


@dataclass(frozen=True)
class ConfirmedPlan:
    """A plan whose layout fits by its trace too, if it was traced.

    Attributes:
        traced: the trace; None if the formula settles it.
        verdicts: layouts for which the traces differ from the formula.
    """

    plan: Plan
    traced: TracedMemory | None
    verdicts: Mapping[Layout, Verdict] = dataclasses.field(default_factory=dict)


def plan_with_traces(
    job: ResolvedJob,
    workers: int,
    machine: Machine,
    must_fit: bool = True,
    always: bool = False,
    trace: bool = True,
    by_formula: Plan | None = None,
) -> ConfirmedPlan:
    """Plan a job as `planned` does, and confirm by traces that its layout fits.

    If a layout does not fit by its trace, the next best one is tried, within TRACE_SECONDS of CPU time. If none fits,
    the layout that needs least is chosen if its trace fits; otherwise the first one stays.

    Args:
        job, workers, machine: the job, its number of workers, and their machine.
        must_fit: require that the layout fits.
        always: trace the layout even if it clearly fits.
        trace: False to trace nothing. A layout that is too large by the closed formula, but may fit by its trace, is no
            error then.
        by_formula: the plan that the same call without a trace has returned; None to make it.

    Raises:
        InputError: as `planned`.
    """
    spec = job.spec
    start = time.process_time()
    verdicts = dict[Layout, Verdict]()
    on_cpu = not spec.resources.per_worker.gpu
    by_formula_plan = by_formula or planned(demand_of(spec), job.shape, workers, machine, must_fit=False)
    must_fit = must_fit and spec.resources.must_fit
    if not trace:
        if must_fit and not by_formula_plan.fits and not may_fit(by_formula_plan):
            by_formula_plan = planned(
                demand_of(spec), job.shape, workers, machine
            )  # raises the error that says why none fits
        layout = by_formula_plan.chosen.layout
        saved = saved_bytes(job.shape, layout, str(spec.train.optimizer.name))
        return ConfirmedPlan(
            by_formula_plan, TracedMemory(layout, (NotTraced(0, "no trace was asked for"),), 0.0, saved)
        )
    if must_fit and not by_formula_plan.fits:
        smallest = _smallest_plan(job, workers, machine, verdicts)
        return smallest or ConfirmedPlan(
            planned(demand_of(spec), job.shape, workers, machine), None
        )  # raises the error that says why none fits
    if not always and fits_with_margin(spec.resources, by_formula_plan):
        return ConfirmedPlan(by_formula_plan, None)
    result = by_formula_plan
    traced = first_traced = traced_memory(job, by_formula_plan.chosen.layout)
    while not traced.fits(result, on_cpu) or (verdicts and traced.reasons):
        verdicts[result.chosen.layout] = _too_large(result, traced, on_cpu)
        seconds_left = TRACE_SECONDS - (time.process_time() - start)
        try:
            result = planned(
                demand_of(spec),
                job.shape,
                workers=workers,
                machine=machine,
                must_fit=must_fit,
                verdicts=verdicts,
            )
        except InputError:
            break
        if seconds_left <= 0.0 or not result.fits:
            break
        traced = traced_memory(job, result.chosen.layout, seconds_left)
    else:
        return ConfirmedPlan(result, traced, verdicts)
    if smallest := _smallest_plan(job, workers, machine, verdicts):
        return smallest
    rejected_by_traces = [
        (rejected, verdict.reason)
        for rejected, verdict in verdicts.items()
        if rejected != by_formula_plan.chosen.layout
    ]
    return ConfirmedPlan(
        dataclasses.replace(by_formula_plan, rejected=(*by_formula_plan.rejected, *rejected_by_traces)),
        first_traced,
    )


def _smallest_plan(
    job: ResolvedJob, workers: int, machine: Machine, verdicts: Mapping[Layout, Verdict]
) -> ConfirmedPlan | None:
    """Return the plan with the layout that needs least memory by the formula, if its trace fits."""
    spec, on_cpu = job.spec, not job.spec.resources.per_worker.gpu
    # No layout fits a byte, and a plan that need not fit then has the layout that needs least.
    no_memory = dataclasses.replace(machine, memory=1.0)
    try:
        smallest = planned(demand_of(spec), job.shape, workers, no_memory, must_fit=False, verdicts=verdicts)
    except InputError:
        return None
    layout, formula = smallest.chosen.layout, smallest.chosen.memory
    if not may_fit(dataclasses.replace(smallest, machine=machine)):
        return None
    traced = traced_memory(job, layout, LAST_TRACE_SECONDS)
    if traced.largest is None or not fits(traced.needed(formula, on_cpu), machine, on_cpu):
        return None
    with_smallest = {**verdicts, layout: Verdict("", traced.largest.memory.peak / formula)}
    chosen_plan = planned(demand_of(spec), job.shape, workers, machine, verdicts=with_smallest)
    return ConfirmedPlan(chosen_plan, traced, with_smallest) if chosen_plan.chosen.layout == layout else None


def _too_large(plan: Plan, traced: TracedMemory, on_cpu: bool) -> Verdict:
    """Return the verdict on a layout that does not fit by its trace, or could not be traced."""
    needed = traced.needed(plan.chosen.memory, on_cpu)
    available = offered(plan.machine, on_cpu)
    if needed <= available:
        return Verdict(
            f"other layouts do not fit by their traces, but this one has no trace: {traced.reasons[0]}", 1.0
        )
    reason = (
        f"needs {needed / 2**30:.2f} GiB per worker by its trace, which offers {available / 2**30:.2f} GiB"
    )
    share = plan.chosen.memory / (plan.machine.memory * MEMORY_SHARE)
    return Verdict(reason, needed / max(available, 1.0) / share)


def check_fits(job: ResolvedJob, machine: Machine) -> None:
    """Raise InputError if the layout that would be chosen needs more memory than the machine offers.

    It is traced only if the formula does not settle it, see `fits_with_margin`.

    Args:
        job: the job.
        machine: one worker.
    """
    spec = job.spec
    if not spec.resources.must_fit:
        return
    confirmed_plan = plan_with_traces(job, spec.resources.workers.max, machine, must_fit=False)
    if confirmed_plan.traced is None:
        return
    on_cpu, layout = not spec.resources.per_worker.gpu, confirmed_plan.plan.chosen.layout
    needed = confirmed_plan.traced.needed(confirmed_plan.plan.chosen.memory, on_cpu)
    if not fits(needed, machine, on_cpu):
        available = offered(machine, on_cpu) / 2**30
        problem = f"{layout} needs {needed / 2**30:.2f} GiB per worker, which offers {available:.2f} GiB"
        hint = teacher_hint(demand_of(spec), job.shape, layout)
        hint = hint or "lower micro_batch, or raise zero or workers"
        raise InputError(problem, "resources", f"{hint}; resources.must_fit false runs it all the same")


def ranks_of(layout: Layout) -> list[int]:
    """Return the ranks to trace: the first rank at the first, last, second and middle index of the pipeline axis.

    Every other index is between two of these.
    """
    indices = dict.fromkeys([0, layout.pp - 1, min(1, layout.pp - 1), layout.pp // 2])
    return [layout.rank(pp=index) for index in indices]


def micro_batches_of(layout: Layout, accumulation: int, index: int, on_cpu: bool) -> tuple[int, ...]:
    """Return the numbers of micro-batches to trace, from which the peak of a step at pipeline `index` follows.

    Without a pipeline two micro-batches suffice. With one, the first number fills the pipeline, and the second adds one
    micro-batch or one round, whose additional bytes are extrapolated. A GPU frees what has arrived at once, so there a
    further micro-batch adds only itself and some bytes of its losses, and the second number is not needed.

    Args:
        layout: the layout.
        accumulation: micro-batches of a rank in a step.
        index: of the rank on the pipeline axis.
        on_cpu: whether workers compute on CPUs.
    """
    if layout.pp == 1:
        return (min(accumulation, 2),)
    in_rounds = layout.schedule in ("interleaved", "zero_bubble")
    round_size = round_length(layout.pp, accumulation) if in_rounds else 1
    filled = 3 * round_size if in_rounds else 2 * layout.pp
    if layout.schedule == "gpipe":
        filled = 2
    elif layout.schedule == "1f1b":
        # A stage of 1F1B holds pp - index micro-batches at once (Narayanan et al., 2021, section 2.2). With twice as
        # many it has both filled and passed its steady state.
        filled = max(2 * (layout.pp - index), layout.pp)
    extended = filled + round_size
    if accumulation <= extended:
        return (accumulation,)
    return (filled, extended) if on_cpu or layout.schedule == "gpipe" else (filled,)

"""The plan of a job as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.data.config import DataSpec
from orchestrator.observe.formatting import count, duration
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.feed import feed
from orchestrator.planner.host_memory import snapshot_bytes, state_bytes
from orchestrator.planner.machines import machine_notes
from orchestrator.planner.memory import needed_bytes, offered
from orchestrator.planner.planner import faster_on_fewer
from orchestrator.planner.search import TIE, Candidate
from orchestrator.planner.step_trace import CATEGORIES

if TYPE_CHECKING:
    from orchestrator.launch.planned_job import PlannedJob
    from orchestrator.planner.choose_precision import Choice
    from orchestrator.planner.demand import Demand
    from orchestrator.planner.frontier import Point
    from orchestrator.planner.splits import RolloutPlan
    from orchestrator.planner.teacher_workers import TeacherPlan
    from orchestrator.planner.trace.layout_memory import TracedMemory

SHOWN = 10


def show_layouts(planned: PlannedJob) -> None:
    """Print the layouts of a planned job, see `show`."""
    from orchestrator.planner.demand import demand_of

    spec = planned.job.spec
    show(
        spec.workload.model,
        demand_of(spec),
        planned.job.shape,
        planned.plan,
        data=spec.data,
        checkpoint=spec.checkpoint,
        traced=planned.traced,
    )


def show(
    model: str,
    demand: Demand,
    shape: ModelShape,
    plan: Plan,
    *,
    data: DataSpec,
    checkpoint: CheckpointSpec,
    traced: TracedMemory,
) -> None:
    """Print the chosen layout, the next best ones, and why others were rejected.

    Args:
        model: the name of the model.
        demand: what the job asks of the planner.
        shape: the model's sizes.
        plan: the plan.
        data: the job's data, which may be streamed.
        checkpoint: whether snapshots are kept in the memory of nodes.
        traced: the memory of the chosen layout, if it could be traced. The closed formula gives that of the others.
    """
    from orchestrator.cli.options import table
    from orchestrator.observe.pages.page import size

    title = f"{model}: {count(shape.parameters)} parameters, {count(plan.tokens)} tokens per step"
    highest = max(traced.peaks(plan.by_stage))
    rows = [
        [
            "chosen" if candidate is plan.chosen else "",
            str(candidate.layout),
            f"{(highest if candidate is plan.chosen else candidate.memory) / 2**30:.2f} GiB",
            duration(candidate.seconds),
            f"{count(plan.tokens / candidate.seconds)} tokens/s",
            "" if candidate is plan.chosen else _loses(candidate, plan.chosen),
        ]
        for candidate in plan.candidates[:SHOWN]
    ]
    table(title, ["", "layout", "memory a rank", "step", "speed", "because"], rows)
    if (more := len(plan.candidates) + plan.passed_over - SHOWN) > 0:
        print(f"  and {more} more legal layout{'s' if more > 1 else ''}, besides those that cannot be faster")
    reasons: dict[str, int] = {}
    for _, reason in plan.rejected:
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        shown = sorted(reasons.items(), key=lambda item: -item[1])[:SHOWN]
        table("Rejected", ["layouts", "because"], [[str(n), reason] for reason, n in shown])
    for line in machine_notes(plan.machine, demand.precision):
        print(f"{line[0].upper()}{line[1:]}.")
    if plan.machine.name:
        print(f"On {plan.machine.name}" + ("." if plan.fits else ", whose memory it does not fit."))
    if plan.row_tokens:
        mean = f"{plan.row_tokens:.0f} of {shape.sequence_length} tokens"
        print(
            f"Rows are cut to the longest of their micro-batch: {mean} on average. The memory is of full rows."
        )
    parts = [(name, value) for name, value in plan.chosen.time.to_json().items() if value > 0.0]
    print("A step: " + ", ".join(f"{name} {duration(value)}" for name, value in parts) + ".")
    if plan.machine.delay:
        low, middle, high = map(duration, plan.quantiles.values())
        print(f"Half of the steps take {middle} or less, 5 % less than {low}, 5 % more than {high}.")
    if (fewer := faster_on_fewer(demand, shape, plan)) is not None:
        world, takes = fewer.chosen.layout.world, duration(fewer.chosen.seconds)
        workers = "one worker is" if world == 1 else f"{world} workers are"
        print(
            f"By these predictions {workers} faster, {takes} per step: set resources.workers.max to {world}."
        )
    if (fed := feed(data, demand.resources.per_worker, plan)) is not None:
        processors = f"{fed.processors} CPU{'s' if fed.processors > 1 else ''} beside the workers"
        waits = f"a step waits {duration(fed.stall_seconds)} while text is left to prepare"
        print(
            f"Streamed text: {processors} make {count(fed.prepared)} tokens/s of it, training reads {count(fed.read)}: "
            f"{waits if fed.stall_seconds else 'it does not wait'}."
        )
    ranks = plan.chosen.layout.world
    if checkpoint.snapshot_every is not None and ranks > 1:
        state = state_bytes(demand.optimizer, checkpoint.ema, shape, pruned=demand.pruned)
        snapshot_size = size(snapshot_bytes(state, ranks))
        print(
            f"Snapshots, if the workers are on several nodes, take up to {snapshot_size} more of host memory for each."
        )
    print("Predicted, not measured: the run's report shows both side by side.")


def show_memory(plan: Plan, traced: TracedMemory, on_cpu: bool) -> None:
    """Print the peak memory of the traced ranks of the chosen layout, by category."""
    from orchestrator.cli.options import table
    from orchestrator.observe.pages.page import size

    rows = [
        [
            str(trace.rank),
            *(size(trace.memory.at_peak[category]) for category in CATEGORIES),
            size(trace.memory.peak),
            trace.memory.phase,
        ]
        for trace in traced.traces
    ]
    if rows:
        table("Memory of the chosen layout", ["rank", *CATEGORIES, "peak", "in the pass"], rows)
    for reason in traced.reasons:
        print(f"Not traced, and by a formula instead: {reason}.")
    if (largest := traced.largest) is not None:
        needed = needed_bytes(traced.layout, largest.memory.peak, largest.saved, on_cpu)
        with_process = ", with the process and a copy for commits" if on_cpu else ""
        print(f"A worker needs {size(needed)}{with_process}.")
    if traced.traces and not traced.fits(plan, on_cpu):
        if largest is None:
            print(f"A worker needs {size(traced.needed(plan.chosen.memory, on_cpu))} at least.")
        print(f"That is more than {size(offered(plan.machine, on_cpu))} that a worker offers.")
    for line in sorted({line for trace in traced.traces for line in trace.assumptions}):
        print(f"Assumed: {line}.")


def show_rollouts(plan: RolloutPlan | None) -> None:
    """Print what is predicted of rollouts, and the fastest split of the workers."""
    from orchestrator.cli.options import table
    from orchestrator.observe.pages.page import size

    if plan is None:
        return
    rows = [
        [
            "chosen" if split is plan.requested else "",
            str(split.generating or "the ranks"),
            str(split.layout),
            duration(split.time.generate),
            duration(split.time.train),
            duration(split.time.seconds),
        ]
        for split in plan.splits
    ]
    table("Workers of rollouts", ["", "generate", "train", "generation", "training", "step"], rows)
    time = plan.requested.time
    overlap = ", beside training" if time.overlaps else ""
    print(
        f"A rollout: transfer {duration(time.transfer)}, generate {duration(time.generate)}{overlap}, reward "
        f"{duration(time.reward)} by rules; for prompts and answers of the longest length."
    )
    best = plan.splits[0]
    if best is not plan.requested and best.time.seconds * (1.0 + TIE) < plan.requested.time.seconds:
        setting = f"with {best.generating} rollout workers" if best.generating else "without rollout workers"
        fewer = plan.requested.layout.world + plan.requested.generating - best.layout.world - best.generating
        number = f"{fewer} fewer workers are" if fewer > 0 else "the same number of workers is"
        print(
            f"By these predictions {number} faster {setting}, {duration(best.time.seconds)} per step: "
            f"{best.layout.world} train."
        )
    if plan.worker_bytes:
        print(
            f"A rollout worker needs {size(plan.worker_bytes)}, and each node with some {size(plan.server_bytes)} "
            f"of host memory for weights"
            + ("." if plan.fits else f"; a worker offers only {size(plan.offered_bytes)}.")
        )


def show_teachers(plan: TeacherPlan | None) -> None:
    """Print what is predicted of teacher workers."""
    from orchestrator.observe.pages.page import size

    for line in plan.text(size, duration) if plan else ():
        print(line)


def show_precision(choice: Choice | None) -> None:
    """Print the chosen precision and the reason, if the planner chose it."""
    if choice:
        print(f"Precision {choice}.")


def show_frontier(points: list[Point]) -> None:
    """Print the numbers of workers that no other number beats in both time and cost."""
    from orchestrator.cli.options import table

    rows = [
        [
            str(point.layout.world),
            str(point.layout),
            duration(point.step_seconds),
            duration(3600.0 * point.hours),
            f"{point.worker_hours:,.1f}",
            "" if point.usd is None else f"{point.usd:,.0f}",
        ]
        for point in points
    ]
    columns = ["workers", "layout", "step", "all steps", "worker hours", "USD"]
    table("Time and cost of numbers of workers that no other beats", columns, rows)
    if any(point.usd is None for point in points):
        print("USD is unknown: limits.usd_per_worker_hour is not set.")


def _loses(candidate: Candidate, chosen: Candidate) -> str:
    """Why a layout was not chosen: the part of its step that exceeds the chosen layout's most."""
    more = {part: seconds - chosen.time.to_json()[part] for part, seconds in candidate.time.to_json().items()}
    part, longest = max(more.items(), key=lambda item: item[1])
    if candidate.seconds <= chosen.seconds * (1.0 + TIE) and longest <= chosen.seconds * TIE:
        return "as fast, with more sharding" if candidate.layout.zero > chosen.layout.zero else "as fast"
    return f"{part} +{duration(longest)}"

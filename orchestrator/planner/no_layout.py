"""Errors that explain why no layout of a job is legal and fits, and which layouts are near. Torch-free."""

from __future__ import annotations

import dataclasses
import math

from cluster.workers.gang import workers_text
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.parallel.config import ParallelSpec
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.parallel.legal_layouts import fit, nearest
from orchestrator.planner.demand import Demand
from orchestrator.planner.memory import early_teacher_bytes, peak_bytes


def no_layout(
    demand: Demand,
    shape: ModelShape,
    workers: int,
    rejected: list[tuple[Layout, str]],
    large: list[tuple[Layout, float]],
    offered: float,
    narrow: Layout | None = None,
) -> InputError:
    """Return the error that explains why there is no layout.

    Args:
        demand, shape, workers: what the job asks of the planner, the sizes of its model, and its number of workers.
        rejected: illegal layouts with the reason.
        large: layouts that do not fit, with their bytes. The error names the smallest, and recommends none of them.
        offered: bytes that a worker offers.
        narrow: the widest layout among those that use too few workers.
    """
    if not demand.searches_layout and rejected:
        return _illegal_given_layout(demand, shape, *rejected[0], offered if large else math.inf)
    hint = ""
    pinned = _pinned_problem(demand, shape, workers)
    if large and not pinned:
        layout, memory = min(large, key=lambda pair: pair[1])
        pinned = f"{layout} needs least, {memory_text(memory, offered)}{_rollout_workers_text(demand)}"
        hint = teacher_hint(demand, shape, layout)
    elif narrow and not pinned:
        return too_narrow(demand.resources, narrow)
    reason = pinned or (rejected[-1][1] if rejected else "")
    return InputError(
        f"no legal layout for {workers_text(workers)}{f': {reason}' if reason else ''}",
        "parallel",
        hint or "change resources or train.global_batch",
    )


def too_narrow(resources: ResourceSpec, widest: Layout) -> InputError:
    """Return the error that no layout uses as many workers as the job requires.

    Args:
        resources: of the workers.
        widest: the widest legal layout.
    """
    workers = resources.workers
    return InputError(
        f"no legal layout uses {workers.text}; the widest is {widest}",
        "resources.workers.min",
        "lower it, or choose a train.global_batch that this many workers can share equally",
    )


def _illegal_given_layout(
    demand: Demand, shape: ModelShape, layout: Layout, reason: str, offered: float
) -> InputError:
    """Return the error for a layout that the job fully specifies, with the nearest legal ones as a hint."""
    batch, shards = demand.batch, demand.shards
    # Bitwise determinism computes each virtual shard as one micro-batch.
    micros = (batch // shards,) if shards else ()

    def is_refused(candidate: Layout) -> bool:
        return bool(demand.engine_problems(candidate)) or peak_bytes(demand, shape, candidate) > offered

    nearest_layouts = "; ".join(map(str, nearest(layout, shape, batch, is_refused, micros)))
    hint = f"the nearest legal layouts are {nearest_layouts}" if nearest_layouts else ""
    if offered < math.inf:
        fitting = f"the nearest layouts that fit are {nearest_layouts}" if nearest_layouts else ""
        hints = filter(None, [fitting, teacher_hint(demand, shape, layout)])
        hint = "; or ".join(hints) or "raise workers, zero or recompute"
        reason += _rollout_workers_text(demand)
    return InputError(reason, "parallel", hint)


def teacher_hint(demand: Demand, shape: ModelShape, layout: Layout) -> str:
    """Return the hint for a layout that is too large because of its teacher; empty if that is not the reason.

    Args:
        demand, shape: what the job asks of the planner, and the sizes of its model and teacher.
        layout: the layout.
    """
    peak = peak_bytes(demand, shape, layout)
    if peak == peak_bytes(demand, dataclasses.replace(shape, teacher=None), layout):
        return ""
    if peak_bytes(demand, dataclasses.replace(shape, teacher_sharded=True), layout) < peak:
        return "set distill.shard to true, so that the data-parallel ranks divide the teacher's weights"
    if not early_teacher_bytes(demand, shape, layout):
        return ""
    source = "" if demand.teacher_workers else "distill.logits.source to workers and "
    return (
        f"these workers run the teacher before the first step; set {source}distill.workers.min to 1, so that only "
        "teacher workers do"
    )


def _rollout_workers_text(demand: Demand) -> str:
    """Return that rollout or teacher workers take memory of nodes, as the end of a sentence; empty if none do."""
    if demand.on_gpu or demand.extra_workers is None:
        return ""
    key = "rollout" if demand.rollout else "distill"
    return f" beside {key}.workers.max {demand.extra_workers.max}"


def _pinned_problem(demand: Demand, shape: ModelShape, workers: int) -> str:
    """Return what is wrong with the pinned part of a layout, whatever the rest is; empty if nothing is."""
    if not isinstance(demand.parallel, ParallelSpec):
        return ""
    pins = demand.parallel.pins
    # DeepSpeed shards at least the optimizer state, and needs ZeRO 3 to offload parameters.
    min_zero = {"deepspeed": 3 if pins.get("offload") == "parameters" else 1}.get(pins.get("engine", ""), 0)
    pinned_layout = Layout(**{"zero": min_zero, **pins})
    if (size := pinned_layout.pp * pinned_layout.cp * pinned_layout.tp) > workers:
        return f"{pinned_layout} needs {size} workers of {workers}; lower a degree or add workers"
    layout = fit(pinned_layout, workers, demand.batch, demand.shards)
    layout = layout or pinned_layout.but(dp=pinned_layout.ep)
    problems = layout.problems(shape, demand.batch) or demand.engine_problems(layout)
    return problems[0] if problems else ""


def memory_text(memory: float, offered: float) -> str:
    """Return the text that says how much memory a layout needs that does not fit.

    Args:
        memory: bytes of a rank.
        offered: bytes that a worker offers.
    """
    return f"{memory / 2**30:.2f} GiB per rank, but a worker offers {offered / 2**30:.2f} GiB"

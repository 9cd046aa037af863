"""Bounds from below on the seconds of a step, by which a search passes over layouts."""

from __future__ import annotations

from orchestrator.parallel.cuts import layers_by_rank
from orchestrator.parallel.layout import SPLIT, Layout, ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.operators import Program, ends
from orchestrator.planner.simulation.step import busiest, inner_layer, parts_of, step_time, with_update


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

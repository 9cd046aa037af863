"""A plan as one HTML page: the step by part, the pipeline's timeline, and memory over the step by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.observe.pages import charts
from orchestrator.observe.pages.page import render
from orchestrator.observe.pages.pipeline_timeline import lanes
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.demand import Demand
from orchestrator.planner.memory import MEMORY_SHARE, rank_memory
from orchestrator.planner.simulation.step import pipeline
from orchestrator.planner.simulation.timeline import SimulatedStep

WIDTH = 1040.0
LANE = 24.0
PARTS = 4
"""Maximum number of micro-batches that are drawn for each stage."""
CURVES = {"first": 0, "last": -1}
SHOWN = 10


def plan_page(
    name: str,
    model: str,
    demand: Demand,
    shape: ModelShape,
    plan: Plan,
    fits: bool,
    needed: float,
    peaks: Sequence[float],
    traced: bool,
) -> str:
    """Return the page of a plan.

    Args:
        name: the name of the job.
        model: the name of its model.
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        plan: the plan.
        fits: whether the workers have the memory that it needs.
        needed: that memory of a worker, in bytes.
        peaks: the peak bytes of tensors at each index of the pipeline axis.
        traced: whether `peaks` are those of a trace, not of the closed formula.
    """
    layout = plan.chosen.layout
    time = plan.chosen.time
    played = None
    parts = layout.accumulation(demand.batch)
    drawn = min(parts, PARTS * layout.pp)
    if layout.pp > 1:
        played = pipeline(shape, layout, drawn, plan.machine, demand.program, keep=True)
    content = {
        "name": name,
        "model": model,
        "layout": str(layout),
        "machine": plan.machine.name or "this machine",
        "workers": layout.world,
        "tokens": plan.tokens,
        "seconds": plan.chosen.seconds,
        "memory": needed,
        "fits": fits,
        "bar": charts.stacked([{k: v for k, v in time.to_json().items() if v > 0 and k != "commit"}], WIDTH),
        "lanes": lanes(played.actions(), played.seconds, LANE, min_width=0.0) if played else [],
        "drawn": (drawn, parts),
        "memories": _memories(demand, shape, plan, played, peaks),
        "traced": traced,
        "candidates": [
            {**c.to_json(), **({"memory_bytes": max(peaks)} if c is plan.chosen else {})}
            for c in plan.candidates[:SHOWN]
        ],
    }
    return render("plan", content)


def _memories(
    demand: Demand, shape: ModelShape, plan: Plan, played: SimulatedStep | None, peaks: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the memory in GiB over the step, of the first and the last rank of a pipeline, or of the only rank.

    The formula gives the shape of the curve. What it adds to the state is scaled to the peak of the rank.
    """
    memories = []
    layout = plan.chosen.layout
    for name, position in CURVES.items() if played else [("every", 0)]:
        index = position % layout.pp
        (parts,) = rank_memory(demand, shape, layout, [index])
        each = parts.micro_batch / (layout.stages // layout.pp)
        points = [(0.0, parts.state)]
        now = parts.state
        for (kind, _, _), begin, end in played.events[index] if played else ():
            points.append((begin, now))
            now += {"F": each, "W": 0.0}.get(kind, -each)
            points.append((end, now))
        if not played:
            points += [(0.5, parts.peak), (1.0, parts.state)]
        highest = max(y for _, y in points)
        times = (
            max(peaks[index] - parts.state, 0.0) / (highest - parts.state) if highest > parts.state else 1.0
        )
        scaled = [(x, (parts.state + (y - parts.state) * times) / 2**30) for x, y in points]
        level = plan.machine.memory * MEMORY_SHARE / 2**30
        shown = level if level < 4 * max(y for _, y in scaled) else None
        plot = charts.line_plot(scaled, WIDTH / 2, 200.0, level=shown, from_zero=True)
        memories.append({"rank": name, "plot": plot, "peak": peaks[index]})
    return memories

"""The frontier of time and cost over the number of workers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import NO_VERDICTS, Plan, Verdict, plan
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.planner import worker_counts
from orchestrator.planner.rollouts import rollout_time


@dataclass(frozen=True)
class Point:
    """The best layout for a number of workers.

    Attributes:
        step_seconds: of one step, with its rollout.
        hours: of all steps.
        worker_hours: hours of all workers together, with the most rollout workers or teacher workers.
        usd: their cost; None if the job gives no price.
    """

    layout: Layout
    step_seconds: float
    hours: float
    worker_hours: float
    usd: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain data."""
        return {
            "workers": self.layout.world, "layout": str(self.layout), "step_seconds": self.step_seconds,
            "hours": self.hours, "worker_hours": self.worker_hours, "usd": self.usd,
        }  # fmt: skip


def frontier(
    demand: Demand,
    shape: ModelShape,
    workers: int,
    machine: Machine,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NO_VERDICTS,
    usd: float | None = None,
) -> list[Point]:
    """Return the points that no other point beats in both time and cost (the Pareto frontier), quickest first.

    Args:
        demand, shape: what the job asks of the planner, and the sizes of its model.
        workers: the largest number of workers; smaller powers of two are tried too.
        machine: the machine of a worker.
        must_fit: leave out layouts that do not fit.
        verdicts: results of traced layouts, see `plan`.
        usd: the price of a worker for an hour; None if it is unknown.

    Raises:
        InputError: if no layout is legal and fits.
    """
    points: dict[int, Point] = {}
    for width in worker_counts(1, workers):
        try:
            chosen_plan = plan(
                demand, shape, workers=width, machine=machine, must_fit=must_fit, verdicts=verdicts
            )
        except InputError:
            if width == workers and not points:
                raise
            continue
        if chosen_plan.fits or not must_fit:
            point = _point(demand, shape, chosen_plan, usd)
            points[point.layout.world] = point
    # Sorted by time, a point is on the frontier if it is cheaper than all quicker ones.
    best = []
    cheapest = float("inf")
    for point in sorted(points.values(), key=lambda candidate: (candidate.hours, candidate.worker_hours)):
        if point.worker_hours < cheapest:
            best.append(point)
            cheapest = point.worker_hours
    return best


def _point(demand: Demand, shape: ModelShape, best_plan: Plan, usd: float | None) -> Point:
    layout = best_plan.chosen.layout
    seconds = best_plan.chosen.seconds
    other_workers = demand.extra_workers.max if demand.extra_workers else 0
    if demand.rollout is not None:
        seconds = rollout_time(demand, shape, best_plan).seconds
    hours = demand.steps * seconds / 3600.0
    worker_hours = hours * (layout.world + other_workers)
    return Point(layout, seconds, hours, worker_hours, worker_hours * usd if usd else None)

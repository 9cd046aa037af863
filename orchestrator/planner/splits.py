"""How the workers of a job are divided between generating answers and training on them. Torch-free and ray-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import NO_VERDICTS, Plan, Verdict
from orchestrator.planner.demand import Demand
from orchestrator.planner.memory import offered
from orchestrator.planner.planner import planned, with_workers
from orchestrator.planner.rollouts import (
    RolloutTime,
    rollout_time,
    sent_bytes,
    unit_seconds,
    with_rollout_time,
    worker_bytes,
)
from orchestrator.train.rollouts.config import RolloutSpec


@dataclass(frozen=True)
class Split:
    """Some workers generate, and the others train.

    Attributes:
        generating: rollout workers; 0 if the ranks generate.
        layout: the layout of the others.
        time: seconds of a step.
    """

    generating: int
    layout: Layout
    time: RolloutTime

    def to_json(self) -> dict[str, Any]:
        """Return the split as plain data."""
        return {
            "generating": self.generating,
            "training": self.layout.world,
            "layout": str(self.layout),
            "step_seconds": self.time.seconds,
            "seconds": {
                part: getattr(self.time, part) for part in ("transfer", "generate", "reward", "train")
            },
        }


@dataclass(frozen=True)
class RolloutPlan:
    """The prediction of a job's rollouts.

    Attributes:
        requested: the split with the job's largest numbers of workers.
        splits: splits of at most as many workers, the fastest first; only `requested` if the job gives the layout.
        worker_bytes: memory that a rollout worker needs; 0 if the ranks generate.
        offered_bytes: memory that a worker offers.
        server_bytes: host memory of the weights' server on each node with rollout workers; 0 if the ranks generate.
    """

    requested: Split
    splits: tuple[Split, ...]
    worker_bytes: float
    offered_bytes: float
    server_bytes: float

    @property
    def fits(self) -> bool:
        """Whether a rollout worker fits the memory of a worker."""
        return self.worker_bytes <= self.offered_bytes

    def with_rollout_time(self, plan: Plan) -> dict[str, Any]:
        """Return what the rollouts change in `predicted` of the JSON of the training workers' plan."""
        return with_rollout_time(plan, self.requested.time)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            **self.requested.to_json(),
            "worker_memory_bytes": round(self.worker_bytes),
            "server_memory_bytes": round(self.server_bytes),
            "fits": self.fits,
            "splits": [split.to_json() for split in self.splits],
        }


def plan_rollouts(
    demand: Demand, shape: ModelShape, plan: Plan, verdicts: Mapping[Layout, Verdict] = NO_VERDICTS
) -> RolloutPlan | None:
    """Return what is predicted of a job's rollouts; None without rollouts.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        plan: the plan of its training workers.
        verdicts: results of traces. Layouts that they refuse are in no split.
    """
    rollout = demand.rollout
    if rollout is None:
        return None
    generating = rollout.workers.max if rollout.workers else 0
    requested = Split(generating, plan.chosen.layout, rollout_time(demand, shape, plan))
    total = plan.chosen.layout.world + generating
    splits = [requested]
    if demand.searches_layout:  # a layout that the job gives has the workers that it has
        refused = {layout: verdict for layout, verdict in verdicts.items() if verdict.reason}
        unit = unit_seconds(demand, shape, plan.machine) / rollout.epochs
        split_of = partial(_split, demand, shape, plan, total=total, refused=refused)
        overlaps = bool(rollout.staleness)
        for workers in _near_balance(requested, total, rollout.units(demand.batch), unit, overlaps=overlaps):
            if workers != generating and (split := split_of(workers)):
                splits.append(split)
    splits.sort(key=lambda split: split.time.seconds)
    return RolloutPlan(
        requested,
        tuple(splits),
        worker_bytes=worker_bytes(demand, shape) if generating else 0.0,
        offered_bytes=offered(plan.machine, not demand.on_gpu),
        server_bytes=sent_bytes(shape) * (1 + rollout.staleness) if generating else 0.0,
    )


def _split(
    demand: Demand,
    shape: ModelShape,
    plan: Plan,
    workers: int,
    *,
    total: int,
    refused: Mapping[Layout, Verdict],
) -> Split | None:
    """Return the fastest layout beside so many of `total` workers that generate; None if the others cannot train."""
    assert demand.rollout is not None
    bounds = {"min": workers, "max": workers}
    rollout = RolloutSpec.model_validate(
        demand.rollout.model_dump() | {"workers": bounds if workers else None}
    )
    training_demand = dataclasses.replace(
        demand, rollout=rollout, resources=with_workers(demand.resources, total - workers)
    )
    try:
        best = planned(
            training_demand, shape, workers=total - workers, machine=plan.machine, verdicts=refused
        )
    except InputError:
        return None
    return (
        Split(workers, best.chosen.layout, rollout_time(training_demand, shape, best)) if best.fits else None
    )


def _near_balance(requested: Split, total: int, units: int, unit: float, *, overlaps: bool) -> list[int]:
    """Return numbers of rollout workers to compare: none, and some near the fastest one.

    With g of N workers a step takes about u / g + t / (N - g), for u seconds in which one worker generates and t in
    which one rank trains. The minimum is at g / (N - g) = sqrt(u / t). If both overlap, the longer of the two counts,
    and the minimum is at u / t. The other candidates leave powers of two for training, which divide most batches.

    Args:
        requested: the job's split.
        total: workers.
        units: units of a step, which more rollout workers cannot share.
        unit: seconds of a unit on one worker, as a share of each step that learns from it.
        overlaps: whether rollout workers generate while the others train.
    """
    ratio = units * unit / (requested.time.train * requested.layout.world)
    if not overlaps:
        ratio = math.sqrt(ratio)
    training = total / (1.0 + ratio)
    power = 2 ** math.floor(math.log2(max(training, 1.0)))
    numbers = {total - round(training), total - power, total - 2 * power}
    return sorted({0} | {min(max(number, 1), units, total - 1) for number in numbers if total > 1})

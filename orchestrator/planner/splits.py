"""How the workers of a job are divided between generating answers and training on them. Torch-free and ray-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.demand import Demand
from orchestrator.planner.planner import planned, with_workers
from orchestrator.planner.rollouts import RolloutTime, offered_bytes, sent_bytes, time_of, worker_bytes
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
    """What is predicted of a job's rollouts.

    Attributes:
        asked: the split with the job's largest numbers of workers.
        splits: splits of as many workers, the fastest first.
        worker_bytes: what a rollout worker needs; 0 if the ranks generate.
        offered_bytes: what a worker offers.
        server_bytes: host memory of the weights' server on each node with rollout workers; 0 if the ranks generate.
    """

    asked: Split
    splits: tuple[Split, ...]
    worker_bytes: float
    offered_bytes: float
    server_bytes: float

    @property
    def fits(self) -> bool:
        """Whether a rollout worker fits the memory of a worker."""
        return self.worker_bytes <= self.offered_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            **self.asked.to_json(),
            "worker_memory_bytes": round(self.worker_bytes),
            "server_memory_bytes": round(self.server_bytes),
            "fits": self.fits,
            "splits": [split.to_json() for split in self.splits],
        }


def plan_rollouts(demand: Demand, shape: ModelShape, found: Plan) -> RolloutPlan | None:
    """Return what is predicted of a job's rollouts; None without rollouts.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        found: the plan of its training workers.
    """
    rollout = demand.rollout
    if rollout is None:
        return None
    generating = rollout.workers.max if rollout.workers else 0
    asked = Split(generating, found.chosen.layout, time_of(demand, shape, found))
    total = found.chosen.layout.world + generating
    splits = [asked]
    for workers in _numbers(total, rollout.units(demand.batch)):
        if workers != generating and (split := _split(demand, shape, found, workers, total)):
            splits.append(split)
    splits.sort(key=lambda split: split.time.seconds)
    return RolloutPlan(
        asked,
        tuple(splits),
        worker_bytes=worker_bytes(demand, shape) if generating else 0.0,
        offered_bytes=offered_bytes(demand, found.machine),
        server_bytes=sent_bytes(shape) * (1 + rollout.staleness) if generating else 0.0,
    )


def _split(demand: Demand, shape: ModelShape, found: Plan, workers: int, total: int) -> Split | None:
    """Return the fastest layout beside so many rollout workers; None if the others cannot train."""
    assert demand.rollout is not None
    number = {"min": workers, "max": workers}
    rollout = RolloutSpec.model_validate(
        demand.rollout.model_dump() | {"workers": number if workers else None}
    )
    others = dataclasses.replace(
        demand, rollout=rollout, resources=with_workers(demand.resources, total - workers)
    )
    try:
        best = planned(others, shape, workers=total - workers, machine=found.machine)
    except InputError:
        return None
    return Split(workers, best.chosen.layout, time_of(others, shape, best)) if best.fits else None


def _numbers(total: int, units: int) -> list[int]:
    """Return numbers of rollout workers to compare, at most as many as a step has units."""
    shares = (0, 1, total // 8, total // 4, total // 2, 3 * total // 4, 7 * total // 8, total - 1)
    return sorted({number for number in shares if number <= min(units, total - 1)})

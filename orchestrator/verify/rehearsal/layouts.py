"""The layout of a rehearsal on few ranks, and another layout that loads its checkpoints. Torch-free."""

from __future__ import annotations

import dataclasses

from orchestrator.parallel.layout import AXES, Layout, ModelShape, divisors
from orchestrator.parallel.legal_layouts import legal, shard_of
from orchestrator.planner.demand import Demand
from orchestrator.train.config import TrainSpec

MOST = 8
"""The maximum number of ranks of a rehearsal, unless the layout's axes need more."""
DIFFERENT = ("pp", "dp", "cp", "tp", "ep", "zero")
"""The fields in which two layouts store the state differently."""


def smaller(layout: Layout, max_ranks: int = MOST) -> Layout:
    """Return the layout with all its axes, on at most `max_ranks` ranks or two on each axis, with micro-batches of one
    sequence.

    Data parallelism shrinks first, because its ranks do the same work.
    """
    degrees = {axis: getattr(layout, axis) for axis in AXES} | {"ep": layout.ep}
    degrees["dp"] = max(min(layout.dp, 4 if layout.shard else 2), layout.ep)

    def world() -> int:
        return degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"]

    while world() > max_ranks:
        lower = {axis: _lower(degrees[axis]) for axis in AXES if axis != "dp" or degrees["ep"] == 1}
        lower["pp"] = max(degrees["pp"] // 2, 2) if degrees["pp"] > 2 else 0  # pp divides no size
        large = [axis for axis in lower if lower[axis]]
        if large:
            axis = max(large, key=lambda name: degrees[name])
            degrees[axis] = lower[axis]
        elif _lower(degrees["ep"]):
            degrees["dp"] = degrees["ep"] = _lower(degrees["ep"])
        else:
            break
    # A small model has one layer per stage, so other pipeline options have nothing to cut.
    usual = dataclasses.replace(layout, virtual=2, first_less=0, last_less=1, recompute_layers=0)
    small = dataclasses.replace(usual, **degrees, micro_batch=1, shard=0)
    return dataclasses.replace(small, shard=shard_of(small, small.replicas // 2)) if layout.shard else small


def _lower(degree: int) -> int:
    """Return the largest proper divisor of `degree`; 0 if that is 1, which would remove the axis."""
    return divisors(degree)[-2] if len(divisors(degree)) > 2 else 0


def sequences_of(layout: Layout, train: TrainSpec) -> int:
    """Return a small global batch: enough micro-batches to fill the pipeline, and two if the job has several."""
    if train.determinism == "bitwise":
        return train.virtual_shards
    parts = 2 * layout.pp if layout.pp > 1 else min(train.global_batch // layout.dp or 1, 2)
    return layout.dp * parts


def another(layout: Layout, demand: Demand, shape: ModelShape, max_ranks: int = MOST) -> Layout | None:
    """Return a legal layout on few ranks that differs from this one in as many ways as possible.

    It fits the job's global batch and engine. None if no other layout is legal.
    """
    worlds = {layout.world, max(layout.world // 2, 1), min(2, max_ranks)}
    result = [
        other
        for world in sorted(worlds)
        for other in legal(shape, world, demand.batch)
        if other.schedule in ("1f1b", layout.schedule) and not demand.engine_problems(other)
    ]
    return max(
        (other for other in result if _differences(layout, other)),
        key=lambda other: (_differences(layout, other), -other.world, str(other)),
        default=None,
    )


def _differences(layout: Layout, other: Layout) -> int:
    return sum(getattr(layout, name) != getattr(other, name) for name in DIFFERENT)

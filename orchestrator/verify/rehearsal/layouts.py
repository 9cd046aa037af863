"""The mesh of a layout on few ranks, and another layout that loads its checkpoints. Torch-free."""

from __future__ import annotations

import dataclasses

from orchestrator.config.spec import JobSpec
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import AXES, Layout, ModelShape, divisors
from orchestrator.parallel.legal_layouts import legal, shard_of
from orchestrator.train.config import TrainSpec

MOST = 8
"""Ranks of a rehearsal, where its axes have room in so many."""
DIFFERENT = ("pp", "dp", "cp", "tp", "ep", "zero")
"""What makes two layouts different ways to hold the state."""


def smaller(layout: Layout, most: int = MOST) -> Layout:
    """The layout with every axis that it has, on at most `most` ranks or two on each axis, one sequence at once. The
    data-parallel width comes down first, since its ranks are alike."""
    degrees = {axis: getattr(layout, axis) for axis in AXES} | {"ep": layout.ep}
    degrees["dp"] = max(min(layout.dp, 4 if layout.shard else 2), layout.ep)

    def world() -> int:
        return degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"]

    while world() > most:
        lower = {axis: _lower(degrees[axis]) for axis in AXES if axis != "dp" or degrees["ep"] == 1}
        lower["pp"] = max(degrees["pp"] // 2, 2) if degrees["pp"] > 2 else 0  # it divides no size
        large = [axis for axis in lower if lower[axis]]
        if large:
            axis = max(large, key=lambda each: degrees[each])
            degrees[axis] = lower[axis]
        elif _lower(degrees["ep"]):
            degrees["dp"] = degrees["ep"] = _lower(degrees["ep"])
        else:
            break
    # a small model has a layer a stage, which leaves nothing to cut otherwise
    usual = dataclasses.replace(layout, virtual=2, first_less=0, last_less=1, recompute_layers=0)
    small = dataclasses.replace(usual, **degrees, micro_batch=1, shard=0)
    return dataclasses.replace(small, shard=shard_of(small, small.replicas // 2)) if layout.shard else small


def _lower(degree: int) -> int:
    """The largest smaller degree that divides what this one divides; 0 if that is no division any more."""
    return divisors(degree)[-2] if len(divisors(degree)) > 2 else 0


def sequences_of(layout: Layout, train: TrainSpec) -> int:
    """A global batch of few sequences, with as many micro-batches as fill the pipeline, and two if the job has
    several."""
    if train.determinism == "bitwise":
        return train.virtual_shards
    parts = 2 * layout.pp if layout.pp > 1 else min(train.global_batch // layout.dp or 1, 2)
    return layout.dp * parts


def another(layout: Layout, spec: JobSpec, shape: ModelShape, most: int = MOST) -> Layout | None:
    """A layout that differs from this one in as many ways as there are, on few ranks, for a job with the global batch
    of `spec`; None if no other is legal."""
    worlds = {layout.world, max(layout.world // 2, 1), min(2, most)}
    found = [
        other
        for world in sorted(worlds)
        for other in legal(shape, world, spec.train.global_batch)
        if other.schedule in ("1f1b", layout.schedule) and not engine_problems(spec, other)
    ]
    return max(
        (other for other in found if _differences(layout, other)),
        key=lambda other: (_differences(layout, other), -other.world, str(other)),
        default=None,
    )


def _differences(one: Layout, other: Layout) -> int:
    return sum(getattr(one, name) != getattr(other, name) for name in DIFFERENT)

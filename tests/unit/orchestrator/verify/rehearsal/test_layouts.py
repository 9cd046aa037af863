"""The mesh of a rehearsal: every axis is kept, in few ranks, and another layout is one that can load its commits."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import AXES, Layout
from orchestrator.planner.demand import demand_of
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.verify.rehearsal.layouts import MOST, another, sequences_of, smaller
from workloads.describe import describe


def spec_of(batch: int = 8, **more: Any) -> JobSpec:
    return parse(job("a.txt", global_batch=batch, **more))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=1024, zero=3, micro_batch=4),
        Layout(pp=16, dp=128, tp=8, schedule="interleaved", zero=1),
        Layout(pp=16, dp=16, tp=8, ep=8, schedule="zbv", zero=1),
        Layout(pp=35, dp=2, tp=8),
        Layout(pp=3, dp=5, tp=3),
        Layout(dp=64, zero=2, shard=8),
        Layout(pp=2, dp=2, cp=4, tp=2),
        Layout(),
    ],
    ids=str,
)
def test_every_axis_is_kept_on_few_ranks(layout: Layout) -> None:
    small = smaller(layout)
    for axis in (*AXES, "ep"):
        assert (getattr(small, axis) > 1) == (getattr(layout, axis) > 1)
        assert getattr(small, axis) <= getattr(layout, axis)
    assert small.dp % small.ep == 0
    assert small.schedule == layout.schedule
    assert small.zero == layout.zero
    alone = sum(getattr(layout, axis) > 1 for axis in AXES)
    assert small.world <= max(MOST, 3**alone)
    assert (small.shard > 0) == (layout.shard > 0)


def test_what_divides_the_model_still_does() -> None:
    small = smaller(Layout(dp=4, tp=20))
    assert 20 % small.tp == 0


@pytest.mark.parametrize(
    "layout", [Layout(pp=2, tp=2), Layout(dp=2), Layout(), Layout(pp=2, dp=2, zero=1)], ids=str
)
def test_another_layout_is_legal_and_differs(layout: Layout) -> None:
    spec, shape = spec_of(sequences_of(layout, spec_of().train)), model_shape(describe("gpt-tiny"), 32)
    assert not layout.problems(shape, spec.train.global_batch)
    other = another(layout, demand_of(spec), shape)
    assert other is not None
    assert not other.problems(shape, spec.train.global_batch)
    assert {axis: getattr(other, axis) for axis in (*AXES, "zero")} != {
        axis: getattr(layout, axis) for axis in (*AXES, "zero")
    }


def test_bitwise_keeps_its_virtual_shards() -> None:
    spec = spec_of(32, determinism="bitwise")
    assert sequences_of(Layout(dp=2), spec.train) == spec.train.virtual_shards

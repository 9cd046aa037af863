"""The frontier of time and cost by the number of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device_profile import load
from orchestrator.planner.frontier import frontier
from orchestrator.planner.rollouts import rollout_time
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.train.rollouts.config import RolloutSpec
from workloads.describe import describe

SHAPE = model_shape(describe("gpt2", {}, objective="causal_lm"), 512)
H100 = load("h100").machine("fp16")


def job(batch: int, **limits: float) -> JobSpec:
    return parse(
        {
            "name": "cases",
            "workload": {"model": "gpt2"},
            "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
            "train": {"steps": 100, "global_batch": batch, "precision": "fp16"},
            "resources": {"workers": {"min": 1, "max": 64}, "per_worker": {"gpu": 1}},
            "limits": limits,
        }
    )


def test_no_point_is_beaten_in_time_and_cost() -> None:
    spec = job(64, usd_per_worker_hour=2.0)
    found = frontier(demand_of(spec), SHAPE, 48, H100, usd=spec.limits.usd_per_worker_hour)
    assert len(found) > 2
    assert [p.hours for p in found] == sorted(p.hours for p in found)
    assert [p.worker_hours for p in found] == sorted((p.worker_hours for p in found), reverse=True)
    for width in (1, 2, 4, 8, 16, 32, 48):
        best = plan(demand_of(spec), SHAPE, width, H100).chosen
        hours, cost = 100 * best.seconds / 3600, 100 * best.seconds / 3600 * best.layout.world
        assert any(p.hours <= hours + 1e-12 and p.worker_hours <= cost + 1e-12 for p in found)
    assert found[0].usd == pytest.approx(2.0 * found[0].worker_hours)
    assert found[0].to_json()["workers"] == found[0].layout.world


def test_the_hours_of_rollout_workers_count() -> None:
    demand = replace(demand_of(job(8)), rollout=RolloutSpec(group=2, max_tokens=64, workers=2))
    (alone,) = frontier(demand, SHAPE, 1, H100)
    time = rollout_time(demand, SHAPE, plan(demand, SHAPE, 1, H100))
    assert alone.step_seconds == time.seconds > time.train
    assert alone.worker_hours == pytest.approx(3 * alone.hours)


def test_without_a_price_there_is_no_cost_in_money() -> None:
    assert {p.usd for p in frontier(demand_of(job(8)), SHAPE, 8, H100)} == {None}


def test_what_fits_no_worker_has_no_point() -> None:
    with pytest.raises(InputError, match="no legal layout"):
        frontier(demand_of(job(8)), SHAPE, 2, replace(H100, memory=1e8))

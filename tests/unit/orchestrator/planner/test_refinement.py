"""A run refines a profile by a bounded amount, on record, and each refinement is taken back."""

from __future__ import annotations

import pytest

from orchestrator.planner.device_profile import Profile, load
from orchestrator.verify.refine import ONCE, TOGETHER, refined, undone

PREDICTED = {"compute": 1.0, "communication": 0.2, "optimizer": 0.1, "bubble": 0.3}
RECORD = {"time": "2026-01-01T00:00:00+00:00", "by": "someone", "run": "runs/a", "steps": 100}


def by(profile: Profile, **measured: float) -> Profile:
    return refined(profile, PREDICTED, {**PREDICTED, **measured}, RECORD)


def test_what_is_predicted_right_changes_nothing() -> None:
    before = load("cpu-core")
    after = by(before)
    assert after.machine("fp32") == before.machine("fp32")
    assert after.refined[0].changes == ()
    assert after.refined[0].by == "someone"


def test_a_slower_step_makes_a_slower_machine_by_its_root() -> None:
    before = load("cpu-core")
    after = by(before, compute=1.21)
    assert after.peak.fp32 == pytest.approx(before.peak.fp32 / 1.1)
    assert after.launch.value == pytest.approx(before.launch.value * 1.1)
    assert after.inside == before.inside
    assert after.refined[0].ratios["compute"] == pytest.approx(1.21)


def test_one_run_moves_a_figure_so_far_and_many_only_so_far_together() -> None:
    before = load("cpu-core")
    once = by(before, communication=100.0)
    assert once.inside.latency == pytest.approx(before.inside.latency * ONCE)
    assert once.inside.bandwidth == pytest.approx(before.inside.bandwidth / ONCE)
    many = before
    for _ in range(9):
        many = by(many, communication=100.0)
    assert many.inside.latency == pytest.approx(before.inside.latency * TOGETHER)
    assert len(many.refined) == 9


def test_an_update_as_predicted_of_a_bandwidth_at_its_bound_changes_no_share() -> None:
    found = by(load("cpu-core"), optimizer=4.0)
    for _ in range(4):
        found = by(found, compute=100.0)
    again = by(found, compute=100.0)
    assert again.memory_bandwidth == found.memory_bandwidth
    assert again.optimizer_share == found.optimizer_share


def test_a_share_stays_a_share() -> None:
    found = load("cpu-core")
    for _ in range(9):
        found = by(found, optimizer=0.001)
    assert found.optimizer_share.value <= 1.0


def test_each_refinement_is_taken_back() -> None:
    first = load("cpu-core")
    second = by(first, compute=2.0, communication=0.1)
    third = by(second, compute=0.5, optimizer=0.2)
    assert undone(third) == second
    assert undone(undone(third)) == first
    assert undone(by(second)) == second, "a run that changed nothing"
    with pytest.raises(ValueError, match="no run"):
        undone(first)

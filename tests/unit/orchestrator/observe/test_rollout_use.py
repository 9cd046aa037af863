"""The time of rollout workers, from events."""

from __future__ import annotations

from typing import Any

from orchestrator.controller.config import LimitSpec
from orchestrator.observe.goodput import timeline
from orchestrator.observe.summary import (
    RolloutUse,
    cost,
    rollout_use,
    rollout_worker_seconds,
    why_unknown,
    worker_seconds,
)
from orchestrator.observe.totals import tally


def change(time: float, workers: int, usd: float | None = None) -> dict[str, Any]:
    return {"time": time, "workers": workers, "machines": [], "usd_per_hour": usd}


EVENTS: list[dict[str, Any]] = [
    {"time": 0.0, "attempt": 0, "phase": "prepare"},
    {"time": 10.0, "attempt": 1, "phase": "start", "layout_after": "dp2 zero0 mb4"},
    # Two changes within the phase before.
    {
        "time": 30.0,
        "attempt": 1,
        "phase": "train",
        "rollout_workers": [change(12.0, 1), change(20.0, 3, 7.2)],
    },
    {"time": 40.0, "attempt": 1, "phase": "train", "rollout_workers": [change(40.0, 2)]},
    # The controller died at 50, and with it the rollout workers.
    {"time": 90.0, "attempt": 1, "phase": "prepare", "reason": "resumed", "last_seen": 50.0},
    {"time": 100.0, "attempt": 2, "phase": "start", "layout_after": "dp2 zero0 mb4"},
    {"time": 110.0, "attempt": 2, "phase": "train", "rollout_workers": [change(105.0, 1)]},
    {"time": 120.0, "attempt": 2, "phase": "done"},
]
TALLY = tally(EVENTS, [])
PHASES = timeline(EVENTS, TALLY)


def test_each_change_counts_from_its_own_time_and_none_while_no_controller_ran() -> None:
    assert rollout_use(EVENTS, PHASES) == [
        RolloutUse(8.0, 1),
        RolloutUse(20.0, 3, 7.2),
        RolloutUse(10.0, 2),
        RolloutUse(55.0, 0),
        RolloutUse(15.0, 1),
    ]
    assert rollout_worker_seconds(EVENTS, PHASES) == 8 + 60 + 20 + 15
    assert rollout_use([], []) == []


def test_they_count_for_worker_hours_and_cost() -> None:
    of_gangs = 2 * 40 + 2 * 20
    assert worker_seconds(PHASES, TALLY, EVENTS) == of_gangs + 103
    assert cost(PHASES, TALLY, EVENTS, usd=36.0) == (of_gangs + 103) / 100
    # By a table of prices, only machines without ranks are added: three workers on one such machine for 20 s.
    assert cost(PHASES, TALLY, EVENTS, usd=0.0) == 20 / 3600 * 7.2
    rated = [{**event, "usd_per_hour": 3.6} if event["phase"] == "train" else event for event in EVENTS]
    assert cost(PHASES, TALLY, rated, usd=0.0) == 60 / 1000 + 20 / 3600 * 7.2


def test_a_machine_of_a_rollout_worker_without_a_price_is_named() -> None:
    limits = LimitSpec(prices="prices.csv")
    unpriced = change(1.0, 1) | {"machines": [{"machine": "g6", "market": "spot", "zone": "z"}]}
    assert "g6, spot, z" in why_unknown(limits, [*EVENTS, {"phase": "train", "rollout_workers": [unpriced]}])


def test_a_clock_that_is_set_back_counts_no_time_twice() -> None:
    events: list[dict[str, Any]] = [
        {"time": 10.0, "attempt": 1, "phase": "train", "rollout_workers": [change(10.0, 2)]},
        {"time": 5.0, "attempt": 1, "phase": "train", "rollout_workers": [change(5.0, 0)]},
        {"time": 12.0, "attempt": 1, "phase": "done"},
    ]
    assert rollout_worker_seconds(events, timeline(events, tally(events, []))) == 0.0

"""What is asked of the events of a run again and again, and what a job has spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.controller import events as module
from orchestrator.controller.config import LimitSpec
from orchestrator.controller.events import EventHistory, Spending, market
from orchestrator.observe.goodput import timeline
from orchestrator.observe.summary import cost
from orchestrator.observe.totals import tally

LIMITS = LimitSpec(hours=100.0, cost_usd=100.0, usd_per_worker_hour=3.0)


def event(time: float, attempt: int, phase: str, **more: Any) -> dict[str, Any]:
    return {"time": time, "attempt": attempt, "phase": phase, "reason": "", "step": 0, **more}


@pytest.fixture(autouse=True)
def _always_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNT_EVERY", -1.0)


def lives(faults: int, seconds: float = 3600.0) -> list[dict[str, Any]]:
    """A run that a fault ends again and again; an attempt in all its phases takes as many seconds.

    Rollout workers come and go within phases, and stay from one attempt to the next.
    """
    found = [event(0.0, 0, "prepare")]
    for n in range(faults):
        at = n * seconds
        layout = {"layout_after": f"dp{n % 3 + 1} zero0 mb4"}
        now = [generating(at, n % 3)] if n % 3 else []
        found.append(event(at, n + 1, "start", **layout, rollout_workers=now))
        changes = [generating(at + 0.05 * seconds, 4), generating(at + 0.08 * seconds, 0)]
        found.append(event(at + 0.1 * seconds, n + 1, "train", rollout_workers=changes))
        found.append(event(at + 0.8 * seconds, n + 1, "stop", first_fault="died"))
        came = [generating(at + 0.85 * seconds, (n + 1) % 3)]
        found.append(event(at + 0.9 * seconds, n + 1, "wait", rollout_workers=came))
    return found


def generating(time: float, workers: int) -> dict[str, Any]:
    return {"time": time, "workers": workers, "machines": [], "usd_per_hour": None}


def test_a_history_knows_what_its_events_say() -> None:
    found = EventHistory(
        [
            event(1.0, 0, "prepare", reason="begun"),
            event(2.0, 0, "wait", data="there"),
            event(3.0, 1, "train"),
            event(
                9.0,
                1,
                "stop",
                first_fault="rank 1 died",
                node="n1",
                skipped={"step": 3, "start": 8, "count": 8},
            ),
            event(11.5, 2, "train"),
            event(12.0, 2, "train", ceiling={"key": "hours", "limit": 4.0, "spent": 3.3}),
            event(13.0, 2, "wait", missing_rows=[[3, 4]]),
        ]
    )
    assert (found.attempts, found.data, found.restart_seconds, found.missing) == (2, "there", 2.5, [[3, 4]])
    assert [skip.start for skip in found.skips] == [8]
    assert [failure.node for failure in found.failures(2.0, 10.0, 0.0)] == ["n1"]
    assert found.failures(0.5, 10.0, 0.0) == (), "too long ago"
    assert found.ceilings == {("hours", 4.0)}
    found.add(event(14.0, 2, "stopped"))
    assert found.failures(100.0, 15.0, 0.0) == (), "an earlier command's"
    found.add(event(7.0, 3, "stop"))
    found.add(event(6.0, 3, "train"))
    assert found.restart_seconds == 0.0, "a clock that was set back"


def whole(events: list[dict[str, Any]], now: float) -> tuple[float, float]:
    rows = tally(events, [])
    phases = timeline(events, rows, now)
    return (
        sum(phase.seconds for phase in phases if phase.name != "down") / 3600,
        cost(phases, rows, events, LIMITS.usd_per_worker_hour) or 0.0,
    )


def test_what_was_spent_is_the_same_counted_piece_by_piece() -> None:
    events = lives(7)
    history = EventHistory([])
    spending = Spending(LIMITS, history)
    for number, one in enumerate(events):
        history.add(one)
        now = one["time"] + 60.0
        assert spending.count((), now) == pytest.approx(whole(events[: number + 1], now))


def test_a_recovery_after_thousands_of_faults_looks_at_the_last_events_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(
        module,
        "timeline",
        lambda events, *rest, **keywords: [looked.append(len(events)), timeline(events, *rest, **keywords)][
            1
        ],
    )
    history = EventHistory(lives(10_000))
    spending = Spending(LIMITS, history)
    spending.count((), 1e8)
    looked.clear()
    for one in lives(10_003)[-12:]:
        history.add(one)
        spending.count((), 1e8)
    assert max(looked) <= 6


@settings(max_examples=100, deadline=None)
@given(jumps=st.lists(st.floats(-1e5, 1e5), min_size=29, max_size=29), last=st.floats(-1e6, 1e6))
def test_a_clock_that_jumps_makes_nothing_negative_and_counts_no_second_twice(
    jumps: list[float], last: float
) -> None:
    events, moved = lives(7), 0.0
    history = EventHistory([])
    spending = Spending(LIMITS, history)
    for one, jump in zip(events, jumps, strict=True):
        moved += jump
        history.add({**one, "time": one["time"] + moved})
        hours, usd = spending.count((), one["time"] + moved + 60.0)
        latest = max([e["time"] for e in history.events] + [one["time"] + moved + 60.0])
        first = min(0.0, history.events[0]["time"])
        assert 0.0 <= hours <= (latest - first) / 3600 + 1e-6
        assert usd >= 0.0
    hours, usd = spending.count((), last)
    assert hours >= 0.0
    assert usd >= 0.0


def test_a_table_of_prices_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    machines = [{"machine": "m1", "market": "spot", "zone": "a"}]
    table = tmp_path / "prices.csv"
    table.write_text("machine,market,zone,usd_per_hour\nm1,spot,a,2.5\n")
    limits = LimitSpec(prices=str(table))
    fields, told = market(limits, machines, 7.0)
    assert (fields["usd_per_hour"], fields["time"], told) == (2.5, 7.0, "")
    table.unlink()
    fields, told = market(limits, machines, 7.0)
    assert (fields["usd_per_hour"], fields["machines"]) == (None, machines)
    assert told.startswith("; the price of the machines is unknown: ")

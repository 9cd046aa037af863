from __future__ import annotations

import json

import pytest

from orchestrator.config.spec import JobSpec, parse
from orchestrator.observe.console import facts
from orchestrator.observe.energy import KG_CO2E_PER_KWH, PUE, WATTS_PER_CPU, WATTS_PER_GPU
from orchestrator.observe.goodput import timeline
from orchestrator.observe.summary import measured, summary, why_unknown, worker_seconds, world
from orchestrator.observe.totals import tally

EVENTS = [
    {"time": 100.0, "attempt": 1, "phase": "prepare"},
    {"time": 110.0, "attempt": 1, "phase": "start", "layout_after": "dp2 zero0 mb4"},
    {"time": 120.0, "attempt": 1, "phase": "train", "layout_after": "dp2 zero0 mb4"},
    {
        "time": 150.0, "attempt": 1, "phase": "stop", "first_fault": "rank 1: killed",
        "step": 3, "lost_steps": 1, "seconds_lost": 10.0,
    },
    {"time": 152.0, "attempt": 2, "phase": "start", "layout_after": {"dp": 1, "tp": 1, "zero": 0}},
    {"time": 160.0, "attempt": 2, "phase": "train"},
    {"time": 190.0, "attempt": 2, "phase": "export"},
    {"time": 195.0, "attempt": 2, "phase": "done", "reason": "all steps done"},
]  # fmt: skip


def row(step: int, at: float, attempt: int, seconds: float, loss: float) -> dict:
    return {
        "step": step, "time": at, "attempt": attempt, "step_seconds": seconds, "loss": loss,
        "tokens": step * 1000, "tokens_per_second": 1000 / seconds, "samples": f"hash{step}",
        "layout": "dp2 zero0 mb4" if attempt == 1 else "dp1", "memory_bytes": 100 + step,
    }  # fmt: skip


ROWS = [row(1, 130, 1, 9, 5.0), row(2, 135, 1, 4, 4.0), row(3, 140, 1, 4, 3.0)]
ROWS += [row(3, 170, 2, 10, 3.0), row(4, 178, 2, 8, 2.5), row(5, 186, 2, 8, 2.0)]


TALLY = tally(EVENTS, reversed(ROWS))


def job(**limits: float) -> JobSpec:
    return parse(
        {
            "name": "demo",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
            "train": {"steps": 5, "global_batch": 4},
            "resources": {"workers": 2, "per_worker": {"cpu": 3, "gpu": 1}},
            "limits": limits,
        }
    )


def test_the_run_in_one_document() -> None:
    plan = {"predicted": {"step_seconds": 3.5, "memory_bytes": 90}}
    found = summary(
        job().summarised, plan, EVENTS, TALLY, {"samples": "hash5"}, unigram_entropy=4.5, sample="To be"
    )
    assert json.loads(json.dumps(found)) == found
    assert (found["state"], found["reason"]) == ("done", "all steps done")
    assert (found["step"], found["steps"], found["tokens"], found["final_loss"]) == (5, 5, 5000, 2.0)
    assert (found["started"], found["ended"], found["attempts"]) == (100.0, 195.0, 2)
    assert (found["unigram_entropy"], found["below_unigram"]) == (4.5, True)
    assert found["receipt"] == "hash5"
    assert [fault["first_fault"] for fault in found["faults"]] == ["rank 1: killed"]
    assert found["layouts"] == ["dp2 zero0 mb4", "dp1"]
    assert found["predicted"] == {"step_seconds": 3.5, "tokens_per_second": None, "memory_bytes": 90}
    assert found["ledger"]["wall_seconds"] == 95.0
    assert found["ledger"]["lost_steps"] == 1
    assert found["sample"] == "To be"


def test_nothing_yet_is_a_summary_too() -> None:
    found = summary(job().summarised, None, [], tally([], []))
    assert (found["state"], found["step"], found["final_loss"], found["receipt"]) == (
        "running",
        0,
        None,
        None,
    )
    assert found["measured"] == {"step_seconds": None, "tokens_per_second": None, "memory_bytes": None}
    assert found["kwh"] == 0


def test_events_that_are_lost_are_told() -> None:
    numbered = [{**event, "number": n} for n, event in enumerate(EVENTS, 1) if n not in (3, 6, 7)]
    assert summary(job().summarised, None, numbered, TALLY)["missing_events"] == [[3, 3], [6, 7]]
    assert dict(facts(summary(job().summarised, None, numbered, TALLY)))["lost events"].startswith(
        "3, 6 to 7: "
    )


def test_medians_leave_out_what_warms_up_and_what_was_lost() -> None:
    found = summary(job().summarised, None, EVENTS, TALLY)["measured"]
    # Kept: 1 and 2 of the first attempt, 3 to 5 of the second; the first of each warms up.
    assert found == {"step_seconds": 8, "tokens_per_second": 125.0, "memory_bytes": 105}
    assert measured(tally(EVENTS, ROWS[:1]))["step_seconds"] == 9, "a single step is better than nothing"


def test_the_median_step_of_rollouts_has_its_share_of_generation_and_the_update_alone_stands_beside_it() -> (
    None
):
    """Three rollouts of two steps, then half of one. The first of the attempt warms up."""
    seconds = (50, 9, 12, 2, 8, 2, 30)
    waits = {1: (40, 5, 1), 3: (1, 7, 2), 5: (1, 5, 0), 7: (1, 27, 0)}
    rollouts = [row(step, 130 + step, 1, spent, 1.0) for step, spent in enumerate(seconds, 1)]
    for each in rollouts:
        if each["step"] in waits:
            parts = ("transfer_seconds", "generate_seconds", "reward_seconds")
            each |= zip(parts, waits[each["step"]], strict=True)
    found = measured(tally(EVENTS[:3], reversed(rollouts)))
    assert found == {
        "step_seconds": (7 + 5) / 2,
        "tokens_per_second": pytest.approx((2000 / 14 + 2000 / 10) / 2),
        "update_seconds": 2.0,
        "memory_bytes": 107,
    }
    told = dict(facts({"measured": found, "predicted": {"step_seconds": 6.5}}))
    assert told["a step"] == "6.0 s in the median (predicted 6.5 s), 2.0 s without its rollout"
    one = measured(tally(EVENTS[:3], reversed(rollouts[:2])))
    assert (one["step_seconds"], one["update_seconds"]) == (29.5, 6.5), "one rollout is better than nothing"
    assert measured(tally(EVENTS[:3], reversed(rollouts[:1])))["step_seconds"] == 50


def test_workers_are_held_from_start_to_stop() -> None:
    # Two workers from 110 to 152, one from 152 to 190; none while preparing or exporting.
    assert worker_seconds(timeline(EVENTS, TALLY), TALLY, EVENTS) == 2 * 42 + 38


def test_cost_and_energy_say_what_they_assume() -> None:
    hours = (2 * 42 + 38) / 3600
    found = summary(job(usd_per_worker_hour=36.0).summarised, None, EVENTS, TALLY)
    assert found["cost_usd"] == pytest.approx(36 * hours)
    kwh = hours * (3 * WATTS_PER_CPU + WATTS_PER_GPU) * PUE / 1000
    assert found["kwh"] == pytest.approx(kwh)
    assert found["co2e_kg"] == pytest.approx(kwh * KG_CO2E_PER_KWH)
    assert "3 CPU x 12 W and 1 GPU x 700 W" in found["assumptions"]
    free = summary(job().summarised, None, EVENTS, TALLY)
    assert free["cost_usd"] is None, "a price nobody gave is not a price of nothing"
    assert "Cost is unknown" in free["assumptions"]
    assert free["cost_unknown"] == "neither limits.usd_per_worker_hour nor limits.prices is set"
    assert found["cost_unknown"] is None


def test_a_machine_without_a_price_is_named() -> None:
    machines = [{"machine": "g5.xlarge", "market": "spot", "zone": "us-west-2b"}]
    limits = job(prices="prices.csv").limits
    events = [*EVENTS, {"machines": machines, "usd_per_hour": None}]
    line = "limits.prices has no line for one of these machines: g5.xlarge, spot, us-west-2b"
    assert why_unknown(limits, events) == line
    assert dict(facts({"cost_usd": None, "cost_unknown": line}))["cost"] == f"unknown: {line}"


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("dp2 zero0 mb16", 2),
        ("pp2 dp3 tp4 ep2 zero1 mb1", 24),
        ({"pp": 2, "dp": 2, "cp": 2, "tp": 1, "ep": 2}, 8),
        (None, 1),
        ("", 1),
    ],
)
def test_world(layout: object, ranks: int) -> None:
    assert world(layout) == ranks

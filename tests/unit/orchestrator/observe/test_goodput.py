from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.observe.goodput import BUCKETS, timeline, with_end, with_end_of
from orchestrator.observe.goodput import ledger as ledger_of
from orchestrator.observe.totals import tally

START = 1_700_000_000.0


def ledger(events: list, rows: list, now: float | None = None) -> dict:
    return ledger_of(events, tally(events, reversed(rows)), now)


def event(at: float, phase: str, attempt: int = 1, **more: object) -> dict:
    return {"time": START + at, "phase": phase, "attempt": attempt, **more}


def row(step: int, at: float, seconds: float = 1.0, attempt: int = 1, **more: object) -> dict:
    return {"step": step, "time": START + at, "step_seconds": seconds, "attempt": attempt, **more}


def seconds(events: list, rows: list, now: float | None = None) -> dict[str, float]:
    """The buckets that are not empty."""
    found = ledger(events, rows, None if now is None else START + now)["seconds"]
    return {bucket: pytest.approx(amount, abs=1e-5) for bucket, amount in found.items() if amount}


CLEAN = [event(0, "prepare"), event(5, "start"), event(8, "train"), event(12, "export"), event(14, "done")]

FAULT = [
    event(0, "start"),
    event(2, "train"),
    event(9, "stop", first_fault="rank 1 died", step=4, lost_steps=2, seconds_lost=2.0),
    event(10, "wait"),
    event(13, "start", 2),
    event(15, "train", 2),
    event(19, "done", 2),
]
FAULT_ROWS = [row(s, 2 + s) for s in (1, 2, 3, 4)] + [row(s, 13 + s, attempt=2) for s in (3, 4, 5)]

CASES = {
    "a clean run": (
        CLEAN,
        [row(1, 9), row(2, 10), row(3, 11)],
        {"prepare": 5, "start": 3, "step": 3, "idle": 1, "export": 2},
    ),
    "the command's own start is told by the first event, and by each that resumes": (
        [
            event(0, "prepare", launched=START - 4),
            event(2, "train"),
            event(9, "done"),
            event(20, "prepare", reason="resumed", launched=START + 15),
            event(21, "done"),
        ],
        [row(1, 9, 7.0)],
        {"launch": 4 + 5, "prepare": 2 + 1, "step": 7},
    ),
    "a command that is older than the death of the controller before has only what came after": (
        [
            event(0, "prepare", launched=0.0),
            event(5, "prepare", reason="resumed", last_seen=START + 3, launched=START + 1),
            event(6, "done"),
        ],
        [],
        {"prepare": 3 + 1, "launch": 2},
    ),
    "stalls are taken out of the steps that contain them": (
        [event(0, "train"), event(10, "done")],
        [
            row(1, 4, 4.0, data_seconds=1.0, commit_seconds=0),
            row(2, 10, 4.0, data_seconds=0.5, commit_seconds=2.0),
        ],
        {"data_stall": 1.5, "checkpoint_stall": 2, "step": 6.5},
    ),
    "stalls beside the steps": (
        [event(0, "train"), event(10, "done")],
        [row(1, 4, 3.0, data_seconds=1.0), row(2, 10, 3.0, data_seconds=1.0, commit_seconds=2.0)],
        {"data_stall": 2, "checkpoint_stall": 2, "step": 6},
    ),
    "a fault: work lost, found out, planned anew, waited, restored, run again": (
        FAULT,
        FAULT_ROWS,
        {"start": 2, "step": 5, "lost_work": 2, "detection": 3, "re_plan": 1, "idle": 4, "restore": 2},
    ),
    "a fault, nothing run again yet": (
        FAULT[:3],
        FAULT_ROWS[:4],
        {"start": 2, "step": 2, "lost_work": 2, "detection": 3},
    ),
    "a fault whose lost rows never arrived": (
        FAULT[:3],
        FAULT_ROWS[:2],
        {"start": 2, "step": 2, "lost_work": 2, "detection": 3},
    ),
    "a planned stop loses nothing": (
        [event(0, "start"), event(1, "train"), event(5, "stop", reason="resize"), event(6, "start", 2)],
        [row(1, 2), row(2, 3), row(3, 4)],
        {"start": 1, "step": 3, "idle": 1, "re_plan": 1},
    ),
    "a controller killed in training": (
        [
            event(0, "start"),
            event(1, "train"),
            event(50, "prepare", 2, reason="resumed: the controller was gone"),
        ],
        [row(1, 2), row(2, 3)],
        {"start": 1, "step": 2, "down": 47},
    ),
    "a controller that was last seen after its last row": (
        [
            event(0, "start"),
            event(1, "train"),
            event(50, "prepare", 2, reason="resumed", last_seen=START + 10),
        ],
        [row(1, 2), row(2, 3)],
        {"start": 1, "step": 2, "lost_work": 7, "down": 40},
    ),
    "a fault whose lost rows were removed": (
        FAULT,
        FAULT_ROWS[:2] + FAULT_ROWS[4:],
        {"start": 2, "step": 5, "lost_work": 2, "detection": 3, "re_plan": 1, "idle": 4, "restore": 2},
    ),
    "the first step ends before training is announced": (
        [event(0, "start"), event(6, "train"), event(8, "done")],
        [row(1, 5.5, 2.0, data_seconds=0.5), row(2, 7), row(3, 8)],
        {"start": 3.5, "data_stall": 0.5, "step": 4},
    ),
    "a fault right after the start": (
        [event(0, "start"), event(6, "stop", first_fault="died", step=1, lost_steps=1)],
        [row(1, 5.5, 2.0)],
        {"start": 4, "lost_work": 2},
    ),
    "a controller killed while it prepared": (
        [event(0, "prepare"), event(30, "prepare", reason="resumed"), event(40, "start")],
        [],
        {"down": 30, "prepare": 10},
    ),
    "a stopped run taken up later": (
        [
            event(0, "prepare"),
            event(2, "stopped"),
            event(100, "prepare", reason="resumed"),
            event(103, "start"),
        ],
        [],
        {"prepare": 5},
    ),
    "a clock that went back": (
        [event(0, "prepare"), event(-5, "start"), event(4, "train")],
        [],
        {"start": 4},
    ),
    "nothing": ([], [], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_second_has_its_bucket(name: str) -> None:
    events, rows, expected = CASES[name]
    assert seconds(events, rows) == expected


def test_goodput_is_useful_steps_over_wall() -> None:
    found = ledger(FAULT, FAULT_ROWS)
    assert found["goodput"] == pytest.approx(5 / 19)
    assert found["lost_steps"] == 2
    assert ledger(FAULT, FAULT_ROWS[:2] + FAULT_ROWS[4:])["lost_steps"] == 2, (
        "whether or not their rows are kept"
    )
    assert ledger([], [])["goodput"] is None


def test_the_time_between_a_stop_and_a_resume_is_no_time_of_the_run() -> None:
    """Otherwise a run that its user paused over night would have the goodput of a broken cluster."""
    pause = 1500
    later = [{**each, "time": each["time"] + pause} for each in CLEAN[1:]]
    resumed = {**event(pause + 2, "prepare", reason="resumed"), "launched": START + pause}
    events = [event(0, "prepare"), event(2, "stopped"), resumed, *later]
    found = ledger(events, [])
    assert found["stopped_seconds"] == pause - 2
    assert found["wall_seconds"] == pytest.approx(14 + 2)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"])
    assert found["seconds"]["down"] == 0
    assert found["seconds"]["launch"] == 2


def test_a_run_without_end_counts_to_now_or_to_its_last_row() -> None:
    events, rows = CLEAN[:3], [row(1, 9), row(2, 10)]
    assert ledger(events, rows)["wall_seconds"] == 10
    assert ledger(events, rows, START + 30)["wall_seconds"] == 30
    assert ledger(CLEAN, rows, START + 30)["wall_seconds"] == 14, "a run that ended stays as long as it was"


def test_a_row_rolls_back_all_from_its_step_on() -> None:
    # Attempt 2 began at step 3 and died before it came back to step 4.
    rows = [row(s, s) for s in (1, 2, 3, 4)] + [row(3, 10, attempt=2)]
    found = tally([event(0, "start"), event(5, "start", 2)], reversed(rows))
    assert (found.useful[0].step, found.lost[0].step, found.useful[1].step) == (2e6, 2e6, 1e6)
    assert (found.last, found.lost_steps) == (rows[-1], {1: 2})


def test_phases_touch() -> None:
    phases = timeline(FAULT, tally(FAULT, reversed(FAULT_ROWS)))
    assert [p.name for p in phases] == ["start", "train", "stop", "wait", "start", "train"]
    assert all(a.end == b.start for a, b in itertools.pairwise(phases))


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_buckets_sum_to_the_wall_whatever_is_written(data: st.DataObject) -> None:
    moment = st.one_of(st.floats(-10, 1000), st.floats(0, 1e9))
    length = st.one_of(
        st.none(), st.floats(allow_nan=True), st.floats(0, 50), st.integers(-5, 50),
        st.sampled_from([-1.8e302, 10**400]),
    )  # fmt: skip
    phases = ("prepare", "wait", "start", "train", "stop", "export", "done", "failed", "stopped", "new")
    attempts = st.integers(1, 3)
    events = data.draw(
        st.lists(
            st.builds(
                lambda at, phase, attempt, **more: event(at, phase, attempt, **more),
                moment, st.sampled_from(phases), attempts,
                reason=st.sampled_from([None, "resumed", "resize"]),
                first_fault=st.sampled_from([None, "died"]), seconds_lost=length,
                step=st.sampled_from([None, 3, 9]), lost_steps=st.sampled_from([None, 0, 2]),
            ),
            max_size=12,
        )
    )  # fmt: skip
    if data.draw(st.booleans()):
        events.sort(key=lambda e: e["time"])
    rows = data.draw(
        st.lists(
            st.builds(
                lambda step, at, attempt, **more: {**row(step, at, attempt=attempt), **more},
                st.integers(0, 12), moment, attempts,
                step_seconds=length, data_seconds=length, commit_seconds=length,
            ),
            max_size=20,
        )
    )  # fmt: skip
    now = data.draw(st.one_of(st.none(), st.floats(0, 2e9)))
    found = ledger(events, rows, now)
    assert set(found["seconds"]) == set(BUCKETS)
    assert all(amount >= 0 for amount in found["seconds"].values())
    assert sum(round(amount * 1e6) for amount in found["seconds"].values()) == round(
        found["wall_seconds"] * 1e6
    )
    if events and events[-1]["phase"] in ("done", "failed", "stopped"):
        times = [e["time"] for e in events]
        whole = found["wall_seconds"] + found["stopped_seconds"]
        assert math.isclose(whole, max(times) - times[0], abs_tol=3e-6)
    assert found["goodput"] is None or 0 <= found["goodput"] <= 1


def test_the_rollout_of_a_step_has_its_own_parts_and_what_overlaps_has_none() -> None:
    parts = {"transfer_seconds": 0.25, "generate_seconds": 1.5, "reward_seconds": 0.5}
    rows = [
        row(1, 11, 3.0, **parts, overlapped_seconds=2.0),
        row(2, 12, 1.0, transfer_seconds=0.25, generate_seconds=9.0),  # no more than the step has
    ]
    found = ledger(CLEAN, rows)
    plain = ledger(CLEAN, [row(1, 11, 3.0), row(2, 12, 1.0)])
    spent = {bucket: found["seconds"][bucket] for bucket in ("transfer", "generate", "reward", "step")}
    assert spent == {"transfer": 0.5, "generate": 2.25, "reward": 0.5, "step": 0.75}
    assert sum(spent.values()) == plain["seconds"]["step"]
    assert found["overlapped_seconds"] == 2.0
    assert {key: found[key] for key in ("goodput", "wall_seconds")} == {
        key: plain[key] for key in ("goodput", "wall_seconds")
    }


def test_generation_overlaps_with_all_steps_of_a_rollout_and_with_no_more() -> None:
    """The row of the last step has it for both: the second rollout says more than its steps took."""
    first = {"transfer_seconds": 0.25, "generate_seconds": 0.0, "reward_seconds": 0.0}
    rows = [
        row(1, 11, 2.0, **first),
        row(2, 13, 2.0, generate_seconds=0.0, overlapped_seconds=3.0),
        row(3, 14, 1.0, **first),
        row(4, 16, 2.0, generate_seconds=0.0, overlapped_seconds=50.0),
    ]
    assert ledger(CLEAN, rows)["overlapped_seconds"] == 3.0 + 3.0


def test_what_comes_after_the_last_event_is_added_once() -> None:
    found = ledger(CLEAN, [])
    closed = with_end(with_end(found, finish=2.0), finish=2.0, shutdown=1.5)
    assert closed["wall_seconds"] == pytest.approx(found["wall_seconds"] + 3.5)
    assert sum(closed["seconds"].values()) == pytest.approx(closed["wall_seconds"])
    assert closed["goodput"] == found["goodput"]
    before = {"ended": 7.0, "ledger": closed}
    assert with_end_of(found, before, 7.0) == closed
    assert with_end_of(found, before, 8.0) == with_end_of(found, {}, 7.0) == found  # of an earlier end

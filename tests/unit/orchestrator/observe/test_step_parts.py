"""Why a step takes as long as it does: the line says the part that it is."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.observe.step_parts import PARTS, StepParts, in_table, latest, straggler, why_slow


def row(step: int = 1, attempt: int = 1, busy: tuple[float, ...] = (), **seconds: float) -> dict[str, Any]:
    """A row whose step takes a second, most of it forward and backward."""
    parts = {"data": 0.01, "forward": 0.2, "backward": 0.4, "optimizer": 0.1, "communication": 0.04} | seconds
    found: dict[str, Any] = {f"{part}_seconds": value for part, value in parts.items()}
    return {"step": step, "attempt": attempt, "step_seconds": 0.8, "mfu": 0.25, "busy_seconds": busy} | found


def line(*rows: dict[str, Any]) -> str:
    return why_slow(StepParts(rows), rows)


def test_parts_are_means_and_what_they_leave_is_told() -> None:
    means = StepParts([row(), row(data=0.03), {"step": 9, "step_seconds": 5.0}]).means  # the last: an old row
    assert means == pytest.approx(
        {
            "data": 0.02,
            "forward": 0.2,
            "backward": 0.4,
            "communication": 0.04,
            "optimizer": 0.1,
            "other": 0.04,
        }
    )
    table = in_table(means)
    assert [part["part"] for part in table][:2] == ["backward", "forward"]
    assert sum(part["share"] for part in table) == pytest.approx(1.0)
    assert {part["name"] for part in table} <= set(PARTS.values())


def test_the_line_says_that_it_is_about_the_mean() -> None:
    """A summary also shows the median, which neither a slow step nor a commit raises."""
    found = line(row(), row(commit=0.2), {**row(), "step_seconds": 5.0})
    assert found.startswith("a step takes 2.3 s in the mean: ")


def test_rows_of_earlier_versions_say_nothing() -> None:
    old = [{"step": 1, "step_seconds": 1.0, "data_seconds": 0.5}]
    assert StepParts(old).means == {}
    assert StepParts(old).mfu is None
    assert line(*old) == line() == ""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"data": 0.3}, "Slow by waiting for samples: prepare onto a faster disk"),
        ({"communication": 0.4}, "Slow by waiting for other ranks: use larger micro-batches"),
        ({"pipeline": 0.4}, "Slow by waiting for other stages: lower parallel.micro_batch"),
        ({"commit": 0.5}, "Slow by waiting for commits: commit less often"),
        ({"optimizer": 0.5}, "Slow by optimizer: shard it over the replicas"),
        (
            {"optimizer": 0.0, "backward": 0.05},
            "Slow by unattributed time: see the operators with",
        ),
        ({}, "Computing takes 75% of the time"),
    ],
)
def test_the_largest_stall_is_named_with_what_helps(seconds: dict[str, float], said: str) -> None:
    found = line(row(**seconds))
    assert said in found
    assert "\n" not in found
    assert "MFU 25.0%" in found


def test_a_run_of_one_rank_is_not_told_to_shard() -> None:
    found = line(row(optimizer=0.5, busy=(0.6,)))
    assert "Slow by optimizer: a larger train.global_batch" in found
    assert "parallel.zero" not in found


def test_a_slow_rank_is_named_by_those_who_wait_for_it() -> None:
    slow = [row(busy=(0.5, 0.5, 1.1, 0.5), communication=0.3)] * 3
    assert straggler(slow) == (2, pytest.approx(2.2))
    assert "Rank 2 computes 2.2 times as long as the median rank" in line(*slow)
    assert straggler([row(busy=(0.5, 0.9))]) == (1, pytest.approx(1.8))
    assert straggler([row(busy=(0.5, 0.55))]) is None
    assert straggler([row(busy=(0.5, 0.9)), row(busy=(0.5,))]) is None  # of gangs of different sizes
    assert straggler([row()]) is None


def test_the_latest_are_of_the_attempt_that_runs_without_its_first() -> None:
    rows = [row(step, attempt) for attempt, step in ((1, 1), (1, 2), (2, 2), (2, 3), (2, 4))]
    assert [each["step"] for each in latest(rows)] == [3, 4]
    assert [each["step"] for each in latest(rows[:3])] == [2]
    assert latest([]) == []


def test_how_long_rank_0_waits_for_the_last() -> None:
    assert StepParts([row(), row()]).late is None
    assert StepParts([row(busy=(0.5,))]).late is None
    assert StepParts([row(busy=(0.5, 0.6)), row(busy=(0.7, 0.4)), row()]).late == pytest.approx(0.05)

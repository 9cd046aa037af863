"""What makes a disturbed run the same run, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.verify.comparison import RunEnd, compare

ROWS = [
    {"step": n, "samples": f"r{n}", "loss": 1.0 / n, "layout": "dp2", "time": float(n)} for n in (1, 2, 3)
]
FAULT = {"attempt": 1, "phase": "stop", "time": 2.0, "first_fault": "exit code -9", "lost_steps": 1}
EVENTS = [{"attempt": 1, "phase": "train", "time": 1.0}, FAULT, {"attempt": 2, "phase": "train", "time": 2.5}]
INJECTED = ("kill@1:2",)


def ended(**changed: Any) -> RunEnd:
    """A run that was killed once and is the same."""
    known = {"outcome": "done", "seconds": 9.0, "fault_times": (), "rows": ROWS, "events": EVENTS, "left": ()}
    return RunEnd(**{**known, **changed})


def test_an_equal_run_is_the_same_run() -> None:
    found = compare("kill@1:2", ended(), ROWS, INJECTED)
    assert found.is_same
    assert (found.receipt, found.losses, found.lost_steps, found.back_after) == ("same", "same", 1, 0.5)


@pytest.mark.parametrize(
    "changed",
    [
        {"outcome": "failed"},
        {"rows": ROWS[:2]},
        {"rows": [*ROWS[:2], {**ROWS[2], "samples": "other"}]},
        {"rows": [*ROWS[:2], {**ROWS[2], "loss": 0.5}]},
        {"left": ("process 7",)},
        {"events": EVENTS[:1]},
    ],
    ids=["failed", "short", "other samples", "other loss", "left behind", "the fault never came"],
)
def test_any_difference_is_not_the_same_run(changed: dict[str, Any]) -> None:
    assert not compare("kill@1:2", ended(**changed), ROWS, INJECTED).is_same


def test_a_fault_that_ends_no_attempt_is_not_waited_for() -> None:
    assert compare("slow@1:2", ended(events=EVENTS[:1]), ROWS, ("slow@1:2",)).is_same

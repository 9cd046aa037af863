"""What is told of saves, and when a run without commits is to stop."""

from __future__ import annotations

from typing import Any

from orchestrator.controller.save_failures import SaveFailures


def outcome(step: int, state: str = "published", reason: str | None = None) -> dict[str, Any]:
    return {"step": step, "state": state, "reason": reason}


def test_failures_are_told_each_and_success_once() -> None:
    saves = SaveFailures(3600.0)
    told = [
        saves.note(outcome(2)),
        saves.note(outcome(4, "failed", "no room")),
        saves.note(outcome(6)),
        saves.note(outcome(8)),
    ]
    assert told == ["", "the save at step 4 failed: no room", "saving resumes with the commit at step 6", ""]


def test_commits_that_pile_up_are_told_when_it_begins() -> None:
    saves, why = SaveFailures(3600.0), "old commits were not removed: PermissionError"
    told = [
        saves.note(outcome(step, reason=reason)) for step, reason in ((2, why), (4, why), (6, None), (8, why))
    ]
    assert told == [f"after the commit at step 2 {why}", "", "", f"after the commit at step 8 {why}"]


def test_a_run_stops_when_saves_have_failed_for_as_long_as_it_may() -> None:
    saves = SaveFailures(0.0)
    saves.note(outcome(4, "failed", "no room"))
    stop = saves.stop()
    assert stop is not None
    assert (stop.kind, "no room" in stop.text) == ("limit", True)

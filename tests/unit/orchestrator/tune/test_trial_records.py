"""What a search has on record."""

from __future__ import annotations

from pathlib import Path

from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.trial_records import TrialEnd, TrialRecords


def test_trials_are_found_again_and_end_once(tmp_path: Path) -> None:
    sweep = RunDir(str(tmp_path))
    records = TrialRecords(sweep)
    assert records.draw([{"a": 1}, {"a": 2}]) == ["0000", "0001"]
    records.end("0000", TrialEnd("done", "0000-1", 9, 0.5))
    records.end("0000", TrialEnd("failed", "0000", 0, None, "later"))
    again = TrialRecords(sweep)
    assert again.configs == {"0000": {"a": 1}, "0001": {"a": 2}}
    assert again.ended == {"0000": TrialEnd("done", "0000-1", 9, 0.5)}
    assert again.draw([{"a": 3}]) == ["0002"]


def test_a_row_torn_by_a_crash_is_a_trial_that_was_not_drawn(tmp_path: Path) -> None:
    sweep = RunDir(str(tmp_path))
    TrialRecords(sweep).draw([{"a": 1}])
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write('{"trial": "0001", "event": "dra')
    again = TrialRecords(sweep)
    assert again.draw([{"a": 2}]) == ["0001"]
    assert TrialRecords(sweep).configs == {"0000": {"a": 1}, "0001": {"a": 2}}


def test_a_search_begins_once(tmp_path: Path) -> None:
    """By the time of its first row it is told from one that was in the same directory before."""
    sweep = RunDir(str(tmp_path))
    for _ in range(2):
        records = TrialRecords(sweep)
        records.begin()
        records.begin()
    assert len(sweep.rows("trials.jsonl")) == 1

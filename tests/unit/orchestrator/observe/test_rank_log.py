"""What ranks printed, by attempt and rank, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.observe import rank_log
from orchestrator.observe.rank_log import AttemptLog, attempts_of, output_of_attempt, output_of_evaluation
from orchestrator.storage.run_directory import RunDir


def test_secrets_are_hidden_and_lines_come_as_they_are_written(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path))
    assert attempts_of(run) == []
    first, second = (output_of_attempt(run.uri, 10).open(f"rank-{rank}.log") for rank in (0, 1))
    output_of_evaluation(run.uri, 4).open("rank-0.log").append(b"not of an attempt\n")
    output_of_attempt(run.uri, 9).open("rank-0.log").append(b"before\n")
    first.append(b"password=hunter2\nbegun")
    assert attempts_of(run) == [9, 10]
    log = AttemptLog(run, 10)
    assert list(log.new_lines()) == [(0, "password=***")]
    second.append(b"other\n")
    first.append(b" and ended\nrest")
    assert list(log.new_lines()) == [(0, "begun and ended"), (1, "other")]
    assert list(log.new_lines(last=True)) == [(0, "rest")]
    assert list(AttemptLog(run, 10, {1}).new_lines()) == [(1, "other")]


def test_logs_of_old_attempts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log, "KEPT", 2)
    run = RunDir(str(tmp_path))
    for attempt in (1, 9, 10, 11):
        for rank in (0, 1):
            output_of_attempt(run.uri, attempt).open(f"rank-{rank}.log").append(b"x\n")
    output_of_evaluation(run.uri, 1).open("rank-0.log").append(b"x\n")
    (tmp_path / "logs" / "mine").mkdir()
    assert attempts_of(run) == [10, 11], (
        "the newest two, and the one that begins before its first line is written"
    )
    assert sorted(path.name for path in (tmp_path / "logs").iterdir())[-2:] == ["evaluation-1", "mine"]

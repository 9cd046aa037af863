"""What ranks printed, by attempt and rank, without secrets."""

from __future__ import annotations

from pathlib import Path

from orchestrator.storage.run_directory import RunDir
from orchestrator.track.rank_log import AttemptLog, attempts_of, output_of_attempt, output_of_evaluation


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

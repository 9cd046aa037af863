"""What a controller does and prints."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from orchestrator.controller import controller_log
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.data.prepare.part_tasks import MOST, log_printed, printed
from orchestrator.observe import rank_log
from orchestrator.observe.rank_log import CONTROLLER, LogReader
from orchestrator.storage.run_directory import RunDir


def lines(folder: Path) -> list[str]:
    """Without the times."""
    found = LogReader(RunDir(str(folder)), CONTROLLER).new_lines(last=True)
    return [line.partition(" ")[2] for _, line in found]


def test_nothing_is_left_of_a_run_that_never_began(tmp_path: Path) -> None:
    log = ControllerLog(str(tmp_path))
    log.event(0, "prepare", "begun")
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_events_and_what_is_printed_and_logged_are_kept_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    log = ControllerLog(str(tmp_path))
    log.event(0, "prepare", "begun")
    log.capture()
    log.keep()
    assert sys.stderr.buffer
    logging.getLogger("orchestrator.data").info("data, part 1 of 2: hello")
    log.event(7, "train", "on its way")
    print("a warning; password=hunter2", file=sys.stderr)
    log.close()
    logging.getLogger("orchestrator.data").info("after its end")
    assert lines(tmp_path) == [
        "prepare: begun",
        "data, part 1 of 2: hello",
        "step 7: train: on its way",
        "step 7: a warning; password=***",
    ]
    assert "a warning" in capsys.readouterr().err


def test_a_run_that_fails_before_it_trains_keeps_it(tmp_path: Path) -> None:
    log = ControllerLog(str(tmp_path))
    log.event(0, "failed", "no room")
    log.close()
    assert lines(tmp_path) == ["failed: no room"]


def test_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log, "KEPT", 2)
    for second in range(3):
        name = f"2026112300000{second}.log"
        monkeypatch.setattr(
            controller_log,
            "output_of_controller",
            lambda run, name=name: (rank_log.output_of_controller(run)[0], name),
        )
        log = ControllerLog(str(tmp_path))
        log.event(0, "failed", str(second))
        log.close()
    assert lines(tmp_path) == ["failed: 1", "failed: 2"]


def test_what_a_task_prints_comes_back_and_goes_on(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with printed() as text:
        assert sys.stdout.encoding
        assert sys.stdout.buffer
        print("one")
        print("two", file=sys.stderr)
        print("x" * MOST)
    assert text.getvalue().startswith("one\ntwo\nxxx")
    assert len(text.getvalue()) == MOST
    assert capsys.readouterr().out.startswith("one\nxxx")
    with caplog.at_level(logging.INFO, "orchestrator"):
        log_printed("part 3 of 4", "one\n\ntwo\n")
    assert [record.getMessage() for record in caplog.records] == [
        "data, part 3 of 4: one",
        "data, part 3 of 4: two",
    ]

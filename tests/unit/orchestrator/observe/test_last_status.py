"""Whether a run that has not ended is still driven: the same answer for every command and in Python."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import job

from orchestrator.api.run import load_run
from orchestrator.cli.app import call
from orchestrator.config.spec import dump, parse
from orchestrator.observe.last_status import ControllerState, controller_state
from orchestrator.observe.pages.report import report
from orchestrator.storage.process_identity import process_identity
from orchestrator.storage.run_directory import RunDir

CONTROLLER = (
    "import json, subprocess, sys\n"
    "from orchestrator.storage.process_identity import lineage\n"
    "print(json.dumps(lineage(2)), flush=True)\n"
    "sys.stdin.read()\n"
)
COMMAND = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CONTROLLER!r}])\n"


@pytest.fixture
def command() -> Iterator[tuple[subprocess.Popen[str], list[dict[str, Any]]]]:
    """A command with a controller below it, and the lineage that the controller has written."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
        process.kill()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(str(tmp_path / "runs" / "killed"))
    found.create()
    found.write_text("job.yaml", dump(parse(job("a.txt"))))
    found.append("events.jsonl", [{"number": 1, "time": time.time() - 60, "phase": "train", "attempt": 1}])
    return found


def status_of(processes: list[dict[str, Any]], silence: float = 0.0) -> dict[str, Any]:
    ranks = [{"rank": 0, "node": "node-7", "pid": 4711, "state": "running", "step": 5}]
    status = {"name": "small", "phase": "train", "step": 5, "steps": 12, "attempt": 1, "layout": "dp2"}
    return {
        **status,
        "eta_seconds": 68.0,
        "ranks": ranks,
        "time": time.time() - silence,
        "processes": processes,
    }


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call([*words])
    return capsys.readouterr().out


def test_a_run_whose_command_was_killed_is_lost_everywhere(
    command: tuple[subprocess.Popen[str], list[dict[str, Any]]],
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    process, processes = command
    run.write_json("status.json", status_of(processes))
    found = load_run(run.uri)
    assert (found.state, found.status["controller"]) == ("train", "alive")
    assert told(capsys, "status", run.uri).startswith("small: train, step 5 of 12, 1 min 08 s left")

    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()  # the controller ends too
    deadline = time.monotonic() + 20
    while found.state == "train" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (found.state, found.status["phase"], found.status["controller"]) == ("lost", "lost", "gone")
    assert (found.status["eta_seconds"], found.status["ranks"]) == (None, [])
    assert repr(found) == f"Run({run.uri!r}, lost)"

    shown = told(capsys, "status", run.uri)
    assert shown.startswith("small: lost, step 5 of 12\nattempt 1, layout dp2, controller gone\n")
    assert "its controller is gone, last seen " in shown
    assert " ago in phase train; " in shown
    assert "the same command resumes it" in shown
    assert "node-7" not in shown
    as_json = json.loads(told(capsys, "status", run.uri, "--json"))
    assert (as_json["state"], as_json["phase"], as_json["lost_phase"]) == ("lost", "lost", "train")

    folder = str(Path(run.path).parent)
    (row,) = json.loads(told(capsys, "top", folder, "--json"))
    assert (row["state"], row["silent"], row["left"]) == ("lost", "", "")
    assert "lost" in told(capsys, "top", folder)
    page = report(run)
    assert '<span class="badge lost">lost</span>' in page
    assert "the same command resumes it" in page


def test_a_stop_of_a_lost_run_says_that_nobody_drives_it(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_json("status.json", status_of([], silence=1e6))
    with pytest.raises(SystemExit) as ended:
        call(["stop", run.uri])
    assert ended.value.code == 2
    assert "no controller drives this run any more; the same command resumes it" in capsys.readouterr().err


def here(pid_born: str) -> dict[str, Any]:
    return {**process_identity(2**22 + 1), "born": pid_born}


@pytest.mark.parametrize(
    ("processes", "silence", "state"),
    [
        ([], 1.0, ControllerState.ALIVE),
        ([], 60.0, ControllerState.SILENT),
        ([], 301.0, ControllerState.GONE),
        (["damaged"], 301.0, ControllerState.GONE),
        ([{"pid": "x"}], 60.0, ControllerState.SILENT),
        ([here("7"), here("8")], 0.5, ControllerState.GONE),
        ([{**here("7"), "boot": "another machine"}], 60.0, ControllerState.SILENT),
        ([{**here("7"), "boot": "another machine"}], 301.0, ControllerState.GONE),
    ],
)
def test_the_signs_of_a_controller(processes: list[Any], silence: float, state: ControllerState) -> None:
    assert controller_state(status_of(processes, silence)) is state


def test_a_controller_that_may_come_back_is_silent() -> None:
    """Ray, which started it, restarts it."""
    alive = process_identity(1)
    assert controller_state(status_of([here("7"), alive], 600.0)) is ControllerState.SILENT
    assert controller_state(status_of([here("7"), alive], 1.0)) is ControllerState.ALIVE


@pytest.mark.parametrize("phase", ["done", "failed", "stopped"])
def test_a_run_that_has_ended_has_no_controller(phase: str) -> None:
    assert controller_state({**status_of([], 1e6), "phase": phase}) is ControllerState.ENDED
    assert controller_state({}) is ControllerState.UNKNOWN

"""Which stages begin when, and how the command ends: the runs themselves are scripted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import job

from orchestrator.chain import drive
from orchestrator.chain.drive import Driver
from orchestrator.chain.stage_run import StageRun, stage_runs
from orchestrator.cli.chain import progress_of, stop_stages
from orchestrator.config.chain import parse_chain
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.launch.active_controller import ask_to_stop
from orchestrator.launch.watched_run import RunOutcome
from orchestrator.observe.last_status import last_status
from orchestrator.storage.process_identity import process_identity
from orchestrator.storage.run_directory import RunDir

DONE, FAILED = RunOutcome(Outcome.DONE, None), RunOutcome(Outcome.FAILED, None, "a fault")
WRONG = RunOutcome(Outcome.WRONG_INPUT, None, "no such file")


def stopped(commit: int | None) -> RunOutcome:
    summary = {"state": "stopped", "commit": commit}
    return RunOutcome(Outcome.STOPPED if commit else Outcome.FAILED, summary, "stopped by the user")


Script = Callable[["Scripted"], RunOutcome | None]


class Scripted:
    """A run that ends as `how` says, which is asked at every look."""

    def __init__(self, name: str, how: Script) -> None:
        self.name, self.stopping, self.looks, self.status = name, False, 0, {"phase": "train"}
        self._how, self.left = how, False

    def leave(self) -> None:
        self.left = True

    def look(self) -> RunOutcome | None:
        self.looks += 1
        return self._how(self)


def ending(outcome: RunOutcome, after: int = 1) -> Script:
    return lambda run: outcome if run.looks >= after else None


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Driver, list[str]]]:
    """Drives base, and left and right that need it, and end that needs left; by name how each ends."""
    monkeypatch.setattr(drive, "REFRESH", 0.0)
    begun: list[str] = []
    scripts: Mapping[str, Script] = {}

    def attach(spec: Any, run: RunDir, *_: Any, **__: Any) -> Scripted:
        begun.append(run.name)
        return Scripted(run.name, scripts[run.name])

    monkeypatch.setattr(drive, "preflight", lambda spec, *_, **__: SimpleNamespace(spec=spec, precision=None))
    monkeypatch.setattr(drive, "attach", attach)

    def make(stages: Any = (), **how: Script) -> tuple[Driver, list[str]]:
        nonlocal scripts
        scripts = {
            "base": ending(DONE),
            "left": ending(DONE),
            "right": ending(DONE),
            "end": ending(DONE),
        } | how
        takes = [{"name": name, "data": {"tokenizer": "stage:base"}} for name in ("left", "right")]
        stages = stages or [{"name": "base"}, *takes, {"name": "end", "data": {"tokenizer": "stage:left"}}]
        chain = parse_chain(job("a.txt") | {"name": "c", "stages": stages})
        root = RunDir(str(tmp_path / "c"))
        root.create()
        return Driver(chain, stage_runs(chain, root), root, set(), lambda _: None, None, {}, 0), begun

    return make


def test_each_stage_begins_when_those_that_it_needs_are_done(driven: Any) -> None:
    driver, begun = driven(left=ending(DONE, after=3))
    assert driver.drive() is False
    assert begun == ["base", "left", "right", "end"]
    ended = driver.finish()
    assert (ended.outcome, ended.line) == (Outcome.DONE, "")
    assert ended.summary["state"] == "done"


def test_a_stage_that_fails_ends_those_that_need_it_and_no_others(driven: Any) -> None:
    driver, begun = driven(left=ending(FAILED), right=ending(DONE, after=5))
    driver.drive()
    assert begun == ["base", "left", "right"]
    ended = driver.finish()
    assert ended.outcome == Outcome.FAILED
    assert ended.line == "left failed: a fault; end does not begin"
    states = {stage["stage"]: (stage["state"], stage["reason"]) for stage in ended.summary["stages"]}
    assert states["left"] == ("failed", "a fault")
    assert states["end"] == ("not begun", "needs left")


def test_the_first_stage_that_fails_ends_all(driven: Any) -> None:
    driver, begun = driven(base=ending(WRONG))
    driver.drive()
    assert begun == ["base"]
    ended = driver.finish()
    assert ended.outcome == Outcome.WRONG_INPUT
    assert ended.line == "base failed: no such file; left, right, end did not begin"


def test_input_that_is_wrong_once_a_stage_begins_is_that_stages(
    driven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(spec: Any, run: RunDir, *_: Any, **__: Any) -> SimpleNamespace:
        if run.name == "right":
            raise InputError("is gone", "data.sources.0.uri a.txt", "put it back")
        return SimpleNamespace(spec=spec, precision=None)

    driver, begun = driven()
    monkeypatch.setattr(drive, "preflight", check)
    driver.drive()
    assert begun == ["base", "left", "end"]
    line = "right failed: stages.right: data.sources.0.uri a.txt: is gone; put it back"
    assert driver.finish().line == line


def test_a_stop_reaches_all_stages_and_no_further_one_begins(
    driven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Scripted) -> RunOutcome | None:
        if run.looks == 1:
            raise KeyboardInterrupt
        return stopped(4) if run.stopping else None

    driver, begun = driven(left=interrupted, right=ending(DONE, after=3))
    driver.drive()
    assert begun == ["base", "left", "right"]
    ended = driver.finish()
    assert ended.outcome == Outcome.STOPPED
    assert ended.line == "left: stopped by the user; still to come: end; the same command continues"


def test_a_stop_while_the_controller_of_a_stage_is_asked_for_reaches_it(
    driven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, begun = driven(base=lambda run: stopped(4) if run.stopping else None)
    attach = drive.attach

    def interrupted(*given: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return attach(*given, **more)

    monkeypatch.setattr(drive, "attach", interrupted)
    driver.drive()
    assert begun == ["base"]
    assert driver.finish().outcome == Outcome.STOPPED


def test_a_stage_that_removes_tokens_is_stopped_from_another_process(
    driven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows that it is at work, ends at once, leaves nothing, and begins again."""
    words = {"name": "words", "vocabulary": {"of": "stage:base"}}
    export = {"checkpoint": {"every": 4, "export": "hf"}}
    driver, begun = driven([{"name": "base"} | export, words])
    stages, root = driver._stages, driver._root
    made: list[str] = []
    answers: list[Any] = []

    def make(stage: StageRun, prepare: Any) -> None:
        made.append(stage.name)
        if len(made) > 1:
            return
        asker.start()
        for _ in range(2_400):
            time.sleep(0.05)
        pytest.fail("the stage was not interrupted within 2 minutes")

    def ask() -> None:
        while not last_status(stages["words"].run).get("phase"):
            time.sleep(0.05)
        answers.append(progress_of(root, driver._chain)["stages"][1])
        stop_stages(root, driver._chain, ask_to_stop, as_json=True)

    asker = threading.Thread(target=ask)
    monkeypatch.setattr("orchestrator.chain.vocabulary._make", make)
    monkeypatch.setattr(drive.ExportTable, "measure", lambda *_: None)
    monkeypatch.setattr(drive.ExportTable, "measure_all", lambda *_: None)
    driver.record()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        driver.drive()
    finally:
        signal.signal(signal.SIGTERM, before)
    asker.join()
    assert [(each["state"], each["reason"]) for each in answers] == [("prepare", "removes tokens")]
    ended = driver.finish()
    assert (ended.outcome, ended.line) == (
        Outcome.STOPPED,
        "stopped by the user; still to come: words; the same command continues",
    )
    assert {stage["stage"]: stage["state"] for stage in ended.summary["stages"]}["words"] == "not begun"
    assert not [*Path(stages["words"].run.path).iterdir()]
    killed = process_identity(os.getpid()) | {"born": "1"}  # as the file of a command that was killed has it
    status = {
        "phase": "prepare",
        "time": time.time(),
        "started": 1.0,
        "note": "removes tokens",
        "processes": [killed],
    }
    stages["words"].run.write_json("status.json", status)
    assert progress_of(root, driver._chain)["stages"][1]["state"] == "lost"
    again = Driver(driver._chain, stages, root, {"base"}, lambda _: None, None, {}, 0)
    again.drive()
    assert (begun, made) == (["base"], ["words", "words"])


def test_a_stop_before_any_commit_says_so(driven: Any) -> None:
    driver, _ = driven(base=ending(stopped(None)))
    driver.drive()
    ended = driver.finish()
    assert ended.outcome == Outcome.FAILED
    assert "no checkpoint yet; the same command starts from the beginning" in ended.line


def test_a_second_interrupt_ends_the_command_at_once(driven: Any) -> None:
    def interrupted(run: Scripted) -> RunOutcome | None:
        runs.append(run)
        raise KeyboardInterrupt

    runs: list[Scripted] = []

    driver, _ = driven(base=interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.drive()
    assert runs[0].left


def test_what_dies_of_ray_is_started_again_and_then_told(
    driven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.workers import ray_internals

    driver, begun = driven()
    gone = iter(["raylet", *[""] * 20])
    monkeypatch.setattr(ray_internals, "dead_main_process", lambda: next(gone))
    assert driver.drive() is True
    line = "Ray's raylet on this machine has died; the same command continues from the last checkpoints"
    assert driver._outcome() == (Outcome.FAILED, line)
    assert driver.drive() is False
    assert begun == ["base", "left", "right", "end"]

"""A stop that another process asks for by a file, whichever cluster the controller is on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_gang import FakeGang
from jobs import job, wait_for, write_text
from prepared import with_data
from scripted import Training, fake_cluster

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller import decide
from orchestrator.controller.controller import Controller
from orchestrator.controller.stop_file import StopRequests, StopSender
from orchestrator.launch.active_controller import ask_to_stop
from orchestrator.storage import background_reader
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return parse(with_data(job(write_text(tmp_path, 20_000), steps=4000), tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(str(tmp_path / "run"))
    found.create()
    return found


def controller(spec: JobSpec, run: RunDir) -> Controller:
    return Controller(spec, run, None, fake_cluster(lambda: FakeGang(Training())))


def test_a_run_is_stopped_by_a_file_and_the_next_controller_ignores_it(
    spec: JobSpec, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    monkeypatch.setattr(background_reader, "EVERY", 0.05)
    first = controller(spec, run)
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(first.drive)
        wait_for(lambda: run.read_json_or_empty("status.json").get("step"), "a step")
        ask_to_stop(run)
        summary = driven.result(timeout=60)
    assert (summary["state"], summary["reason"]) == ("stopped", "stopped by the user")
    assert 0 < summary["commit"] == summary["step"] < 4000
    with pytest.raises(InputError, match="this run has ended already"):
        ask_to_stop(run)

    monkeypatch.setattr(
        "orchestrator.controller.status_writer.lineage", lambda: [{**lineage()[0], "born": "9"}]
    )
    short = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": summary["step"] + 8})})
    again = Controller(spec, run, short.train.steps, fake_cluster(lambda: FakeGang(Training()))).drive()
    assert again["step"] == summary["step"] + 8, "the request was meant for the first controller"


def test_each_controller_is_asked_once(run: RunDir) -> None:
    """Ray may restart the controller before it has heard."""
    asked = StopSender(run, "enough")
    first, second = ({"processes": [{"pid": pid, "born": "1"}]} for pid in (41, 42))
    assert not asked.ask({})
    assert asked.ask(first)
    (Path(run.path) / "stop.json").unlink()
    assert asked.ask(first)
    assert not run.exists("stop.json")
    assert asked.ask(second)
    assert StopRequests(run, {"pid": 42, "born": "1"}).look() == "enough"
    assert StopRequests(run, {"pid": 41, "born": "1"}).look() == ""
    run.write_text("stop.json", "[1")
    assert StopRequests(run, {"pid": 42, "born": "1"}).look() == ""

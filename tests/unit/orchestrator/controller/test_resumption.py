"""A run whose controller dies again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_gang import FakeGang
from jobs import job, write_text
from prepared import with_data
from scripted import Training, fake_cluster

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller import decide
from orchestrator.controller.controller import Controller
from orchestrator.controller.decide import resume
from orchestrator.controller.events import EventHistory
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import State
from orchestrator.storage.run_directory import RunDir

RESTARTS = 3


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    document = job(write_text(tmp_path, 20_000)) | {"limits": {"restarts": RESTARTS}}
    return parse(with_data(document, tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(str(tmp_path / "run"))
    found.create()
    return found


def taken_up(record: RunHistory, spec: JobSpec) -> State:
    return resume(spec.limits, record.state("prepare"), record.event_history.died_last)


def controller(spec: JobSpec, run: RunDir, died: bool) -> Controller:
    return Controller(spec, run, None, fake_cluster(lambda: FakeGang(Training())), died=died)


def test_it_ends_in_words_once_that_was_as_often_as_the_job_allows(
    spec: JobSpec, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    RunHistory(spec, run).close()
    run.write_json("status.json", {"memory_percent": 97.4})
    for death in range(1, RESTARTS + 1):
        record = RunHistory(spec, run, died=True)
        assert (taken_up(record, spec).phase, record.event_history.died_last) == ("prepare", True)
        assert len(taken_up(record, spec).failures) == death
        record.close()
    summary = controller(spec, run, died=True).drive()
    assert (summary["state"], summary["commit"]) == ("failed", None)
    assert summary["reason"].startswith(
        "4 failures within 3600 s without a new commit, the last: the controller's "
    )
    assert "with 97 % of its node's memory in use" in summary["reason"]
    again = controller(spec, run, died=False).drive()
    assert again["state"] == "done", "the same command begins to count anew"


def test_deaths_between_which_there_was_a_commit_do_not_count(spec: JobSpec, run: RunDir) -> None:
    store = Store(run.at("checkpoints"))
    for step in range(1, 3 * RESTARTS):
        store.publish(step, store.write_raw(step, 0, []), {"position": step, "receipt": "0" * 32, "rows": []})
        record = RunHistory(spec, run, died=True)
        assert len(taken_up(record, spec).failures) == 1
        record.close()


def test_a_death_that_somebody_took_up_by_hand_does_not_count(spec: JobSpec, run: RunDir) -> None:
    for _ in range(2 * RESTARTS):
        record = RunHistory(spec, run)
        assert taken_up(record, spec).failures == ()
        record.close()


def test_what_is_long_ago_does_not_count() -> None:
    def event(time: float) -> dict[str, Any]:
        told = {"phase": "prepare", "reason": "resumed: dead", "step": 0, "attempt": 0, "controller_died": 0}
        return {"time": time, **told}

    found = EventHistory([event(time) for time in (0.0, 50.0, 90.0)])
    assert [failure.time for failure in found.failures(60.0, 100.0, 1000.0)] == [950.0, 990.0]

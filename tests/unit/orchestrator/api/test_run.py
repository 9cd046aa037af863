"""Runs as Python objects, before there is anything to show, damaged, and with arguments that are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from jobs import job

from cluster.jobs.ray_jobs import PENDING, RUNNING, Submission
from orchestrator.api import run as module
from orchestrator.api.job import Job
from orchestrator.api.run import Run, RunFailed, load_run
from orchestrator.api.start import run, submit
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import dump, parse
from orchestrator.controller.state import Phase
from orchestrator.launch import active_controller
from orchestrator.observe.last_status import LOST, WAITING, WAITS
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    """The directory of a run that has done nothing yet."""
    found = RunDir(str(tmp_path / "run"))
    found.create()
    found.write_text("job.yaml", dump(parse(job("a.txt"))))
    Path(found.path, "events.jsonl").touch()
    return found


def test_a_young_run_has_the_columns_of_its_tables(begun: RunDir) -> None:
    found = load_run(begun.uri)
    assert list(found.commits()[["loss", "bytes"]].index) == []
    assert list(found.metrics()["loss"]) == []
    assert found.evaluations().index.name == "step"
    begun.append("metrics.jsonl", [{"step": 1, "attempt": 1, "time": 1.0, "step_seconds": 0.5, "loss": 3.0}])
    assert found.metrics()["loss"].to_dict() == {1: 3.0}


def test_a_commit_that_cannot_be_read_hides_no_other(begun: RunDir) -> None:
    (Path(begun.path) / "checkpoints" / "step-00000004").mkdir(parents=True)
    (Path(begun.path) / "checkpoints" / "step-00000004" / "manifest.json").write_text('{"torn')
    found = load_run(begun.uri)
    assert list(found.commits().index) == [4]
    assert all(found.commits()["problem"])


def test_who_waits_for_a_run_that_nobody_drives_is_told(
    begun: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_controller, "SILENCE", 0.2)
    monkeypatch.setattr(module, "EVERY", 0.05)
    begun.write_json("status.json", {"phase": "train", "time": 1.0})
    with pytest.raises(
        RunFailed,
        match=r"no controller drives .* any more; the same command continues from its last checkpoint",
    ):
        load_run(begun.uri).wait()


class JobThatEnds:
    """A cluster with one job, which is running, and has ended with `state` when it is looked at a sixth time; then it
    has told `told`."""

    def __init__(self, state: str, message: str, told: Callable[[], None]) -> None:
        self.now = Submission("small-2", "small", "", 0, "pending", "", 100.0, None, None, "")
        self._ended = dataclasses.replace(self.now, state=state, message=message)
        self._looks, self._told = 0, told

    def get(self, _: str) -> Submission:
        self._looks += 1
        if self._looks == 6:
            self._told()
        return self._ended if self._looks >= 6 else dataclasses.replace(self.now, state="running")


def told(run: RunDir, state: str, time: float, reason: str = "") -> None:
    run.write_json("status.json", {"phase": state, "step": int(time), "time": time})
    run.write_json("summary.json", {"state": state, "ended": time, "reason": reason})


def submitted(
    run: RunDir, state: str, message: str = "", at_the_end: Callable[[], None] = lambda: None
) -> Run:
    jobs: Any = JobThatEnds(state, message, at_the_end)
    return Run(run, parse(job("a.txt")), (jobs, jobs.now))


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("before", ["done", "stopped", "failed"])
def test_the_end_of_a_run_that_goes_on_is_not_that_of_the_time_before(begun: RunDir, before: str) -> None:
    told(begun, before, 60.0, "of the time before")
    found = submitted(begun, "stopped", at_the_end=lambda: told(begun, "stopped", 160.0))
    assert (found.state, found.status, found.summary) == ("running", {}, {})
    assert found.wait(timeout=9).state == "stopped"
    assert (found.status["step"], found.summary["ended"]) == (160, 160.0)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("state", ["failed", "wrong input"])
def test_a_job_that_fails_before_its_run_begins_tells_why_itself(begun: RunDir, state: str) -> None:
    told(begun, "failed", 60.0, "of the time before")
    found = submitted(begun, state, "no such image")
    with pytest.raises(RunFailed, match=r"^no such image$"):
        found.wait(timeout=9)
    assert (found.state, found.summary) == (state, {})


@pytest.mark.usefixtures("_at_once")
def test_a_run_that_fails_says_why(begun: RunDir) -> None:
    found = submitted(begun, "failed", "exit code 1", lambda: told(begun, "failed", 160.0, "NaN at step 3"))
    with pytest.raises(RunFailed, match=r"^NaN at step 3$"):
        found.wait(timeout=9)


@pytest.mark.usefixtures("_at_once")
def test_a_run_that_was_done_before_is_done(begun: RunDir) -> None:
    told(begun, "done", 60.0)
    found = submitted(begun, "done").wait(timeout=9)
    assert (found.state, found.summary["ended"]) == ("done", 60.0)


@pytest.mark.usefixtures("_at_once")
def test_a_run_that_has_ended_is_waited_for_until_its_job_has(begun: RunDir) -> None:
    """Else what is submitted next would be taken for what is at work."""
    told(begun, "done", 160.0)
    found = submitted(begun, "done")
    assert found.state == "done"
    found.wait(timeout=9)
    assert found._submission is not None
    assert found._submission[1].has_ended


def test_a_search_is_no_run(begun: RunDir) -> None:
    begun.append("trials.jsonl", [{"trial": "0001", "event": "drawn", "time": 1.0}])
    with pytest.raises(InputError, match="is the folder of a search"):
        load_run(begun.uri)


def test_an_export_has_a_form_that_there_is(begun: RunDir) -> None:
    for names, numbers, form in (("foo", None, "dcp"), (None, "f64", "gguf")):
        with pytest.raises(InputError, match=r"there is no '(foo|f64)'"):
            load_run(begun.uri).export(step=None, form=form, names=names, numbers=numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [run, submit])
@pytest.mark.parametrize(
    ("options", "where"),
    [({"until": 0}, "until"), ({"until": -1}, "until"), ({"until": "6"}, "until"), ({"until": 6.5}, "until"),
     ({"until": True}, "until"), ({"priority": "high"}, "priority"), ({"job": {}}, "job"), ({"job": "a.yaml"}, "job")],
    ids=str,
)  # fmt: skip
def test_arguments_of_a_wrong_kind_are_refused_before_anything_is_done(
    start: Any, options: dict[str, Any], where: str, tmp_path: Path
) -> None:
    given = {"job": Job(**job("a.txt")), "run_dir": tmp_path / "run", **options}
    with pytest.raises(InputError, match=rf"^{where}: "):
        start(**given)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_process_has_not_ended_is_not_deleted(begun: RunDir) -> None:
    with pytest.raises(InputError, match=r"has not ended; Run\.stop\(\) ends it"):
        submitted(begun, "done").delete()
    assert Path(begun.path).exists()


def test_the_states_of_a_run_are_all_described() -> None:
    described = Run.state.__doc__ or ""
    phases = {*get_args(Phase)} - {*WAITS}
    assert [
        each for each in (*phases, WAITING, LOST, PENDING, RUNNING, *Outcome) if f'"{each}"' not in described
    ] == []

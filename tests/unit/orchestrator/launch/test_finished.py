"""Whether a run has done all that its job asks for, and what it writes again of what it has lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import changed, job

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import MEASURED
from orchestrator.checkpoint.identity import CONTINUED, IDENTITY, read_job
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.launch import start_run
from orchestrator.launch.finished import PastRun, finished_summary
from orchestrator.launch.watched_run import RunOutcome
from orchestrator.storage.run_directory import ORIGIN, RunDir


@pytest.fixture
def document() -> dict[str, Any]:
    return job("none.txt")


def commit(run_dir: RunDir, spec: JobSpec, step: int, **meta: Any) -> None:
    store = Store(run_dir.commits)
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    told = {"position": 8 * step, "receipt": "", "tokens": 8, IDENTITY: spec.identity(), **meta}
    store.publish(step, store.write_raw(step, 0, [piece]), told)


@pytest.mark.parametrize("content", [None, "[]", "null"])
def test_a_run_without_a_summary_has_not_ended(run_dir: RunDir, content: str | None) -> None:
    if content is not None:
        run_dir.write_text("summary.json", content)
    assert finished_summary(run_dir) is None


@pytest.mark.parametrize(("kept", "done"), [((8, 12), True), ((8,), False), ((), True)])
def test_a_run_that_was_done_goes_on_where_its_last_commit_is_gone(
    document: dict[str, Any], run_dir: RunDir, kept: tuple[int, ...], done: bool
) -> None:
    """All of them gone was somebody's wish, for the model has been exported."""
    for step in kept:
        commit(run_dir, parse(document), step)
    row = {"step": 12, "attempt": 1, "time": 1.0, "step_seconds": 1.0}
    run_dir.append("metrics.jsonl", [row | {"saves": [{"step": 8, "state": "published"}]}])
    run_dir.write_json("summary.json", {"state": "done", "commit": 12})
    assert (PastRun(parse(document), run_dir).done() is not None) is done


def test_a_run_that_was_done_is_extended(document: dict[str, Any], run_dir: RunDir) -> None:
    document["train"]["optimizer"] = {"schedule": "constant"}
    commit(run_dir, parse(document), 12)
    run_dir.write_json("summary.json", {"state": "done", "commit": 12, "steps": 12})
    assert PastRun(parse(document), run_dir).done() is not None
    assert PastRun(changed(document, train={"steps": 13}), run_dir).done() is None
    with pytest.raises(InputError, match="it cannot be lowered"):
        PastRun(changed(document, train={"steps": 11}), run_dir).done()


@pytest.mark.parametrize("found", [{"commit": 8}, {"state": "stopped", "commit": 8}, {"state": ["done"]}])
def test_a_summary_that_does_not_say_done_ends_nothing(
    document: dict[str, Any], run_dir: RunDir, found: dict[str, Any]
) -> None:
    run_dir.write_json("summary.json", found)
    assert PastRun(parse(document), run_dir).done() is None


def test_a_run_that_ended_on_a_plateau_is_done_where_the_job_still_ends_it_there(
    document: dict[str, Any], run_dir: RunDir
) -> None:
    document["evaluate"] = {"sets": {"held": {"sources": [{"uri": "none"}]}}}
    told = {"best": 1.0, "stale": 3, "best_of": "held.loss", MEASURED: {"batches": None, "averaged": 0}}
    commit(run_dir, parse(document), 8, **told)
    run_dir.write_json("summary.json", {"state": "done", "commit": 8, "steps": 12})

    def is_done(patience: int, metric: str = "held.loss", batches: int | None = None) -> bool:
        asked = {"stop_when": {"metric": metric, "patience": patience}, "evaluate": {"batches": batches}}
        return PastRun(changed(document, **asked), run_dir).done() is not None

    assert is_done(3)
    assert is_done(2)
    assert not is_done(4)
    assert not is_done(3, "held.accuracy")
    assert not is_done(3, batches=1)
    assert PastRun(parse(document), run_dir).done() is None  # without stop_when all steps are asked for


def test_a_run_is_not_done_without_the_export_that_the_job_asks_for(
    document: dict[str, Any], run_dir: RunDir
) -> None:
    spec = changed(document, checkpoint={"export": None})
    commit(run_dir, spec, 12)
    run_dir.write_text("job.yaml", dump(spec))
    run_dir.write_json("summary.json", {"state": "done", "commit": 12, "steps": 12, "export": None})

    def is_done(**asked: Any) -> bool:
        return PastRun(changed(document, checkpoint=asked), run_dir).done() is not None

    assert is_done(export=None)
    assert not is_done(export="hf")
    run_dir.write_text("job.yaml", dump(changed(document, checkpoint={"export": "hf"})))
    run_dir.write_json("summary.json", {"state": "done", "commit": 12, "export": {"uri": "elsewhere"}})
    assert is_done(export="hf")
    assert is_done(export="hf", export_at="commit")
    assert is_done(export=None)
    assert not is_done(export="gguf")
    assert not is_done(export="hf", export_to="/another")
    pushing = {"export": "hf", "push": "me/model"}
    run_dir.write_text("job.yaml", dump(changed(document, checkpoint=pushing)))
    for outcome, pushed in (("pushed", True), ("not_pushed", False)):
        made = {"uri": "elsewhere", outcome: "text"}
        run_dir.write_json("summary.json", {"state": "done", "commit": 12, "export": made})
        assert is_done(**pushing) is pushed


def test_a_run_that_was_taken_up_again_is_not_done_by_what_it_was_before(
    document: dict[str, Any], run_dir: RunDir
) -> None:
    commit(run_dir, parse(document), 12)
    run_dir.write_json("summary.json", {"state": "done", "commit": 12, "steps": 12})
    run_dir.write_json("status.json", {"phase": "done"})
    assert PastRun(parse(document), run_dir).done() is not None
    run_dir.write_json("status.json", {"phase": "export"})
    assert PastRun(parse(document), run_dir).done() is None


@pytest.mark.parametrize("lost", ["gone", "cut"])
def test_a_job_file_that_a_finished_run_has_lost_is_written_again(
    document: dict[str, Any], run_dir: RunDir, lost: str
) -> None:
    spec, text = parse(document), dump(parse(document))
    commit(run_dir, spec, 12)
    run_dir.write_json("summary.json", {"state": "done", "commit": 12, "export": {"uri": "export"}})

    def again() -> RunOutcome:
        return start_run.run(spec, run_dir, None, None, lambda status: pytest.fail("something runs"))

    if lost == "cut":
        run_dir.write_text("job.yaml", text[:60])
        for look in (lambda: read_job(run_dir), again):
            with pytest.raises(
                InputError, match=r"job\.yaml.*; put it back; or remove it and run the job again"
            ):
                look()
        run_dir.remove("job.yaml")
    assert again().outcome is Outcome.DONE
    assert read_job(run_dir) == spec


def test_nothing_is_written_of_a_run_that_nothing_tells_of(document: dict[str, Any], run_dir: RunDir) -> None:
    PastRun(parse(document), run_dir).put_back()
    assert list(Path(run_dir.path).iterdir()) == []


def test_where_a_run_began_is_written_again_from_its_commit(
    document: dict[str, Any], run_dir: RunDir
) -> None:
    told = {"run": "first", "step": 8, "position": 64, "receipt": "abc"}
    commit(run_dir, parse(document), 12, **{CONTINUED: told})
    for text in (None, '{"run": "x'):
        if text is not None:
            run_dir.write_text(ORIGIN, text)
        PastRun(parse(document), run_dir).put_back()
        assert run_dir.read_json(ORIGIN) == told


def test_a_step_that_is_passed_already_starts_nothing(document: dict[str, Any], run_dir: RunDir) -> None:
    spec = parse(document)
    assert PastRun(spec, run_dir).beyond(1) == ""
    commit(run_dir, spec, 8)
    assert PastRun(spec, run_dir).beyond(8) == ""
    ended = start_run.run(spec, run_dir, 7, None, lambda status: pytest.fail("something runs"))
    line = "step 8 is committed, beyond --until 7: nothing was started"
    assert (ended.outcome, ended.line) == (Outcome.STOPPED, line)


def test_a_finished_run_says_what_has_no_effect_any_more(document: dict[str, Any], run_dir: RunDir) -> None:
    """Whatever of a job is no part of the run's identity, and neither where nor how it runs."""
    run_dir.write_text("job.yaml", dump(parse(document)))
    changes = {
        "limits": {"hours": 9},
        "notify": {"webhook": "$HOOK"},
        "train": {"stability": {"retries": 7}},
        "data": {"validation": {"sources": [{"uri": "held.txt"}]}},
    }
    assert PastRun(parse(document), run_dir).line() == f"{run_dir.uri} is finished: nothing to do"
    line = PastRun(changed(document, **changes), run_dir).line()
    assert "changes of notify, limits.hours, train.stability.retries, data.validation in the job file" in line

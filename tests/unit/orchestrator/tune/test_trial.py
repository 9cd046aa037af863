from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import job

from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.same_inputs import InputsChanged
from orchestrator.tune.trial import FAILED, RunFailed, Trial
from orchestrator.tune.trial_job import job_of_trial
from orchestrator.tune.trial_values import evaluated_value

TUNE = {"space": {"train.optimizer.lr": {"choice": [1e-3, 2e-3]}}, "sampler": "random", "trials": 2}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Whose run fails for want of memory."""

    def fail(*_: Any, **__: Any) -> int:
        raise RunFailed("no memory")

    sweep = RunDir(str(tmp_path))
    sweep.write_text("job.yaml", dump(parse(job("a.txt") | {"tune": TUNE})))
    monkeypatch.setattr(Trial, "_drive", fail)
    found = object.__new__(Trial)
    params = {"train.optimizer.lr": 1e-3}
    given = {"sweep": str(tmp_path), "trial": "0001", "params": params, "ended": None, "deadline": None}
    found._begin(given)
    return found


def test_a_run_that_failed_is_not_tried_again(trial: Trial, tmp_path: Path) -> None:
    assert trial.step()["failed"] == "no memory"
    (tmp_path / "0001" / FAILED).write_text('{"reason": "as before"}')
    assert trial.step()["failed"] == "as before"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", "3"])
def test_a_damaged_note_of_it_is_replaced(trial: Trial, tmp_path: Path, content: str) -> None:
    assert trial.step()["failed"] == "no memory"
    (tmp_path / "0001" / FAILED).write_text(content)
    assert trial.step()["failed"] == "no memory"
    assert RunDir(str(tmp_path / "0001")).read_json(FAILED) == {"reason": "no memory"}


def test_a_trial_that_would_read_other_files_ends_nothing_but_the_search(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: Any, **__: Any) -> int:
        raise InputsChanged("differs from the text that earlier trials read", "data.sources", "put it back")

    monkeypatch.setattr(Trial, "_drive", changed)
    found = trial.step()
    assert found["changed"] == "data.sources: differs from the text that earlier trials read; put it back"
    assert (found["limited"], found["done"], found["failed"], found["finished"]) == (True, True, "", False)
    assert not (tmp_path / "0001" / FAILED).exists()


def test_a_metric_of_an_evaluation_is_that_of_the_last_one(tmp_path: Path) -> None:
    """Not a mean over steps, as of training; of a run that ends before there is one, that is said."""
    document = job("a.txt") | {"tune": {**TUNE, "metric": "validation.loss"}, "evaluate": {"every": 4}}
    document["data"]["validation"] = {"share": 0.1}
    sweep = RunDir(str(tmp_path))
    sweep.write_text("job.yaml", dump(spec := parse(document)))
    run = RunDir(str(tmp_path / "0001"))
    run.create()
    made = {4: 3.0, 8: 2.0}
    rows = [
        {"step": n, "attempt": 1, "time": float(n), "step_seconds": 0.1, "loss": 9.0} for n in range(1, 11)
    ]
    for row in rows:
        if (value := made.get(row["step"])) is not None:
            sets = {"validation": {"loss": value}}
            row["evaluations"] = [
                {"step": row["step"], "attempt": 1, "time": 1.0, "seconds": 1.0, "sets": sets}
            ]
    run.append("metrics.jsonl", rows)
    assert spec.tune is not None
    assert spec.evaluate is not None
    value = partial(evaluated_value, spec.tune.first, sweep, "0001", every=spec.evaluate.every)
    assert [value(rung) for rung in (4, 6, 10)] == [3.0, 3.0, 2.0]
    with pytest.raises(InputError, match=r"evaluate\.every.*up to step 2.*lower it"):
        value(2)


def one(tmp_path: Path, losses: Mapping[int, float | None], **more: Any) -> tuple[Trial, Any]:
    """A trial whose run has these losses by step, and its job."""
    sweep = RunDir(str(tmp_path))
    sweep.write_text("job.yaml", dump(spec := parse(job("a.txt") | {"tune": {**TUNE, "window": 1}})))
    run = RunDir(str(tmp_path / "0001"))
    run.create()
    rows = [
        {"step": n, "attempt": 1, "time": float(n), "step_seconds": 0.1, "loss": loss}
        for n, loss in losses.items()
    ]
    run.append("metrics.jsonl", rows)
    found = object.__new__(Trial)
    given = {"sweep": str(tmp_path), "trial": "0001", "params": {}, "ended": None, "deadline": None}
    found._begin(given | more)
    return found, spec


def test_a_run_that_ends_itself_before_the_rung_has_ended(tmp_path: Path) -> None:
    """By a plateau, or by the job's own limits: the search does not ask for it again."""
    trial, spec = one(tmp_path, {n: 5.0 - n / 10 for n in range(1, 7)})
    found = trial._result(
        spec.train.steps,
        RunDir(str(tmp_path / "0001")),
        evaluations_every=None,
        rung=8,
        reached=6,
        limited=False,
        why="no better for 3 evaluations",
    )
    assert (found["step"], found["done"], found["limited"], found["finished"]) == (6, True, False, False)
    assert (found["value"], found["ended"]) == (pytest.approx(4.4), "no better for 3 evaluations")


def test_a_run_that_the_hours_of_the_search_cut_short_has_not_failed(tmp_path: Path) -> None:
    trial, spec = one(tmp_path, {})
    found = trial._result(
        spec.train.steps,
        RunDir(str(tmp_path / "0001")),
        evaluations_every=None,
        rung=8,
        reached=0,
        limited=True,
        why="limits.hours",
    )
    assert (found["failed"], found["limited"], found["value"], found["ended"]) == ("", True, math.inf, "")
    with pytest.raises(InputError, match="no row has the metric"):
        trial._result(
            spec.train.steps,
            RunDir(str(tmp_path / "0001")),
            evaluations_every=None,
            rung=8,
            reached=0,
            limited=False,
            why="",
        )


def test_what_is_no_number_is_the_worst_value(tmp_path: Path) -> None:
    trial, spec = one(tmp_path, dict.fromkeys(range(1, 9), math.nan))
    assert (
        trial._result(
            spec.train.steps,
            RunDir(str(tmp_path / "0001")),
            evaluations_every=None,
            rung=8,
            reached=8,
            limited=False,
            why="",
        )["value"]
        == math.inf
    )


def test_a_step_that_predicts_nothing_is_left_out_of_the_mean(tmp_path: Path) -> None:
    trial, spec = one(tmp_path, {7: 2.0, 8: None})
    trial._tune = trial._tune.model_copy(update={"window": 2})
    assert (
        trial._result(
            spec.train.steps,
            RunDir(str(tmp_path / "0001")),
            evaluations_every=None,
            rung=8,
            reached=8,
            limited=False,
            why="",
        )["value"]
        == 2.0
    )


def test_nothing_of_a_trial_is_exported_whatever_the_job_exports(tmp_path: Path) -> None:
    document = job("a.txt") | {"tune": TUNE}
    exports = {
        "export": "gguf",
        "export_numbers": "q8_0",
        "export_to": str(tmp_path / "e"),
        "export_at": "commit",
    }
    document["checkpoint"] |= exports
    sweep = RunDir(str(tmp_path))
    sweep.write_text("job.yaml", dump(parse(document)))
    found = read_job(sweep)
    assert found is not None
    made = job_of_trial(found, sweep, "0001", {})
    assert made.name == f"{tmp_path.name}-0001", "one job may be searched into many directories"
    kept = made.checkpoint
    assert (kept.export, kept.export_to, kept.export_at, kept.export_numbers) == (None, None, "end", None)


def test_a_trial_is_evaluated_at_every_rung_if_it_is_decided_by_an_evaluation(tmp_path: Path) -> None:
    document = job("a.txt", steps=32) | {"evaluate": {"every": 200, "at": [7]}}
    document["data"]["validation"] = {"share": 0.1}
    found = []
    for metric in ("validation.loss", "loss"):
        tune = {**TUNE, "metric": metric, "scheduler": "asha"}
        sweep = RunDir(str(tmp_path / metric))
        sweep.create()
        sweep.write_text("job.yaml", dump(parse(document | {"tune": tune})))
        base = read_job(sweep)
        assert base is not None
        asked = job_of_trial(base, sweep, "0001", {}).evaluate
        assert asked is not None
        found.append(asked.at)
    assert found == [[4, 7, 16, 32], [7]]  # the warm-up has two steps

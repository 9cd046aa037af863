from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job

from orchestrator.job.errors import InputError
from orchestrator.job.spec import dump, parse
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.trial import FAILED, RunFailed, Trial

TUNE = {"space": {"train.optimizer.lr": {"choice": [1e-3, 2e-3]}}, "sampler": "random", "trials": 2}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Whose run fails for want of memory."""

    def fail(*_: Any) -> int:
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


def test_a_metric_of_an_evaluation_is_that_of_the_last_one(tmp_path: Path) -> None:
    """Not a mean over steps, as of training; where none is made before the first decision, that is said."""
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
    found = object.__new__(Trial)
    found._begin({"sweep": str(tmp_path), "trial": "0001", "params": {}, "ended": None, "deadline": None})
    assert [found._evaluated(spec, rung) for rung in (4, 6, 10)] == [3.0, 3.0, 2.0]
    with pytest.raises(InputError, match=r"evaluate\.every.*up to step 2.*lower it to 2"):
        found._evaluated(spec, 2)

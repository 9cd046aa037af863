from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job

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

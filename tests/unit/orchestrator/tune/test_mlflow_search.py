"""A search whose MLflow server never ends an answer ends itself, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job
from sockets import trickling

from orchestrator.job.spec import parse
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import mlflow_search


def test_an_answer_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_search, "PATIENCE", 2.0)
    sweep = RunDir(str(tmp_path / "sweep"))
    sweep.create()
    sweep.append(TRIALS, [{"time": 1e9, "trial": "0000", "event": "drawn"}])
    tune = {"space": {"train.optimizer.lr": {"loguniform": [1e-4, 1e-2]}}, "trials": 1}
    with trickling() as address:
        tracking = {"uri": f"http://{address}", "experiment": "x"}
        spec = parse({**job("a.txt"), "tune": tune, "tracking": tracking})
        assert mlflow_search.publish(spec, sweep, {"trials": [], "best": None}) == "no answer within 2 s"

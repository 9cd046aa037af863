"""Datasets and commits of a run on a real MLflow store."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.observe import mlflow_inputs
from orchestrator.observe.mlflow_inputs import NamedData, data_in, log_commits, log_data
from orchestrator.observe.mlflow_run import MlflowRun
from orchestrator.storage.run_directory import RunDir

BORN = 1_700_000_000.0
DATA = [
    NamedData("training", "abc", "/data/corpus", "training", {"tokens": 9}),
    NamedData("validation", "def", "/data/held-out", "validation", {"tokens": 3}),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(str(tmp_path / "run"))
    found.create()
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tracking URI of a database; making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def commit(run_dir: RunDir, step: int, loss: float) -> None:
    store = Store(run_dir.at("checkpoints"))
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    meta = {"position": step, "receipt": f"hash{step}", "attempt": 1, "loss": loss, "layout": {"dp": 1}}
    store.publish(step, store.write_raw(step, 0, [piece]), meta)


def evaluation(step: int, loss: float) -> dict[str, Any]:
    sets = {"validation": {"loss": loss}}
    return {"step": step, "attempt": 1, "time": BORN + step, "seconds": 1.0, "sets": sets}


def models(run: MlflowRun, **how: Any) -> list[Any]:
    return list(run.client.search_logged_models([run.experiment], **how))


def test_the_best_commit_is_found_and_those_that_are_gone_are_not(store: str, run_dir: RunDir) -> None:
    run = MlflowRun(store, "commits", "demo", run_dir.uri, BORN, {"a": 1})
    log_data(run, DATA)
    for step, loss in ((2, 3.0), (4, 1.5), (6, 2.5)):
        commit(run_dir, step, loss + 0.1)
        run_dir.append("evals.jsonl", [evaluation(step, loss)])
        run.log_evaluations([evaluation(step, loss)])
        log_commits(run, "demo.2", run_dir, DATA)
    log_commits(run, "demo.2", run_dir, DATA)  # twice is once
    inputs = run.client.get_run(run.run_id).inputs.dataset_inputs
    assert {(each.dataset.name, each.tags[0].value) for each in inputs} == {
        ("training", "training"), ("validation", "validation"),
    }  # fmt: skip

    best = [{"field_name": "metrics.validation.loss", "ascending": True}]
    found = models(run, order_by=best)
    assert [model.tags["orchestrator.step"] for model in found] == ["4", "6", "2"]
    assert (found[0].name, found[0].status.name, found[0].tags["receipt"]) == (
        "demo-2-step-4",
        "READY",
        "hash4",
    )
    linked = {metric.key: (metric.value, metric.dataset_name) for metric in found[0].metrics}
    assert linked == {"validation.loss": (1.5, "validation"), "commit.loss": (1.6, "training")}
    seen = [(m.step, m.value) for m in run.client.get_metric_history(run.run_id, "validation.loss")]
    assert sorted(seen) == [(2, 3.0), (4, 1.5), (6, 2.5)], "each once"

    shutil.rmtree(run_dir.at("checkpoints/step-00000004"))
    log_commits(run, "demo.2", run_dir, DATA)
    assert {model.tags["orchestrator.step"] for model in models(run)} == {"2", "6"}


def test_a_commit_that_is_evaluated_later_gets_its_metrics_then(store: str, run_dir: RunDir) -> None:
    run = MlflowRun(store, "later", "demo", run_dir.uri, BORN, {"a": 1})
    commit(run_dir, 2, 3.0)
    log_commits(run, "demo", run_dir, [])
    run_dir.append("evals.jsonl", [evaluation(2, 2.0)])
    log_commits(run, "demo", run_dir, [])
    [model] = models(run)
    assert {metric.key for metric in model.metrics} == {"commit.loss", "validation.loss"}


def test_a_run_s_data_is_what_it_began_with(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manifest:
        tokens, documents, bytes, digest = 9, 2, 40, "d" * 64

    @dataclasses.dataclass
    class Found:
        manifest: type[Manifest] = Manifest

    def data_of(run: RunDir, uri: str) -> Found:
        if "gone" in uri:
            raise OSError(uri)
        return Found()

    monkeypatch.setattr(mlflow_inputs, "data_of", data_of)
    run_dir.append("events.jsonl", [{"time": BORN, "attempt": 0, "phase": "prepare"}])
    assert data_in(run_dir) == []
    told = {
        "time": BORN,
        "attempt": 0,
        "phase": "wait",
        "data": "s3://ann:hunter2@b/x",
        "sets": {"wiki": "/w", "old": "/gone"},
    }
    run_dir.append("events.jsonl", [told])
    shares = [(d.name, d.context, d.profile.get("share")) for d in data_in(run_dir, 0.1)]
    assert shares[:2] == [("training", "training", None), ("validation", "validation", 0.1)]
    assert [(d.name, d.context, d.digest, d.uri) for d in data_in(run_dir)] == [
        ("training", "training", "d" * 36, "s3://ann:***@b/x"), ("wiki", "validation", "d" * 36, "/w"),
    ]  # fmt: skip

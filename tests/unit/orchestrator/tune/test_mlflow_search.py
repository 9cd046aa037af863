"""A search in MLflow, on a real store in SQLite; and a server that never ends an answer."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import job, wait_for
from sockets import trickling
from tokenizers import Tokenizer, models

from orchestrator.config.spec import JobSpec, parse
from orchestrator.export import hugging_face
from orchestrator.observe import mlflow_parent
from orchestrator.observe.mlflow_delivery import connect
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import mlflow_search
from orchestrator.tune.mlflow_search import LiveSearch
from orchestrator.tune.trial_records import TrialEnd, TrialRecords

TUNE = {
    "space": {"train.optimizer.lr": {"loguniform": [1e-4, 1e-2]}},
    "trials": 1,
    "register_as": "best-of-it",
}
BEST = {"trial": "0000", "run": "0000", "step": 12, "value": 2.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def spec_of(store: str, experiment: str) -> JobSpec:
    return parse({**job("a.txt"), "tune": TUNE, "tracking": {"uri": store, "experiment": experiment}})


def searched(folder: Path, spec: JobSpec, born: float) -> tuple[RunDir, TrialRecords, str]:
    """A search with one trial that is at work, and the id of the trial's run in MLflow."""
    sweep = RunDir(str(folder / "sweep"))
    sweep.create()
    sweep.write_text("job.yaml", "name: small\n")
    records = TrialRecords(sweep)
    records.begin()
    records.draw([{"train.optimizer.lr": 1e-3}])
    run = RunDir(sweep.at("0000"))
    run.create()
    run.append(EVENTS, [{"time": born, "phase": "prepare", "attempt": 1}])
    return sweep, records, connect("trial", spec.tracking, run, spec.model_dump(mode="json")).run_id


def client_of(store: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def runs(store: str, experiment: str) -> list[Any]:
    client = client_of(store)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def export(run_uri: str, step: int, target: str) -> None:
    Path(target).mkdir(parents=True)
    Path(target, "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(Path(target, "tokenizer.json")))


@pytest.mark.slow
def test_a_search_is_another_one_than_that_which_was_there_before(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials are its own in MLflow, and its best model is registered, as one that MLflow loads."""
    monkeypatch.setattr(hugging_face, "export", export)
    spec, client, parents, trials = spec_of(store, "again"), client_of(store), [], []
    for born in (1e9, 2e9):
        sweep, _, run_id = searched(tmp_path, spec, born)
        trials.append(run_id)
        trial = {"trial": "0000", "state": "done", "runs": ["0000"]}
        found = {"trials": [trial], "best": BEST, "metric": "loss", "steps": 12}
        assert mlflow_search.publish(spec.name, spec.tracking, spec.tune, sweep, found) is None
        parents.append(client.get_run(run_id).data.tags["mlflow.parentRunId"])
        version = client.get_model_version_by_alias("best-of-it", "best")
        assert (tmp_path / "sweep").rename(tmp_path / f"sweep-{born:.0f}")
    assert len(set(trials)) == len(set(parents)) == 2
    assert [client.get_run(run_id).data.tags["mlflow.parentRunId"] for run_id in trials] == parents
    assert {v.run_id for v in client.search_model_versions("name = 'best-of-it'")} == set(trials)
    assert version.run_id == trials[0], "an equal one is not better"
    for run_id in trials:
        there = {Path(each.path).name for each in client.list_artifacts(run_id, "model")}
        assert {"config.json", "MLmodel", "components"} <= there


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_a_search_at_work_is_seen_at_work(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    monkeypatch.setattr(mlflow_parent, "EVERY", 0.05)
    name = str(error)
    spec = spec_of(store, name)
    sweep, records, trial = searched(tmp_path, spec, 1e9)
    live, client = LiveSearch(spec.name, spec.tracking, spec.tune, sweep, records), client_of(store)
    news = {"trials": 2, "ended": 0, "failed": 0, "running": ["0000"], "steps": 5, "best": None}

    def parent() -> Any:
        return next((run for run in runs(store, name) if run.info.run_id != trial), None)

    def work() -> None:
        wait_for(parent, "the search to be there")
        live.tell(news)
        wait_for(lambda: "mlflow.parentRunId" in client.get_run(trial).data.tags, "the trial to be nested")
        records.end("0000", TrialEnd("done", "0000", 12, 2.0))
        live.tell({**news, "ended": 1, "running": [], "best": BEST})
        wait_for(lambda: parent().data.metrics.get("trials_ended") == 1, "the figures")
        assert parent().data.metrics["best_loss"] == 2.0
        assert (parent().data.tags["best_trial"], parent().info.status) == ("0000", "RUNNING")
        if error is not None:
            raise error

    with pytest.raises(error) if error else contextlib.nullcontext(), live.follower():
        work()
    statuses = {KeyboardInterrupt: ("KILLED", "KILLED"), RuntimeError: ("FAILED", "KILLED")}
    found = parent().info.status, client.get_run(trial).info.status
    assert found == statuses.get(error, ("RUNNING", "RUNNING"))
    assert len(runs(store, name)) == 2


def test_a_server_that_does_not_answer_delays_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_parent, "LAST", 0.2)
    with trickling() as address:
        spec = spec_of(f"http://{address}", "x")
        sweep = RunDir(str(tmp_path / "sweep"))
        sweep.create()
        records = TrialRecords(sweep)
        records.begin()
        began = time.monotonic()
        with (
            pytest.raises(KeyboardInterrupt),
            LiveSearch(spec.name, spec.tracking, spec.tune, sweep, records).follower(),
        ):
            raise KeyboardInterrupt
        assert time.monotonic() - began < 60


def test_an_answer_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_search, "PATIENCE", 2.0)
    monkeypatch.setattr(mlflow_search, "LONGEST", 0.0)
    sweep = RunDir(str(tmp_path / "sweep"))
    sweep.create()
    TrialRecords(sweep).begin()
    with trickling() as address:
        spec = spec_of(f"http://{address}", "x")
        assert (
            mlflow_search.publish(spec.name, spec.tracking, spec.tune, sweep, {"trials": [], "best": None})
            == "no answer within 2 s"
        )


def test_trials_that_did_not_come_to_their_end_are_not_at_work(store: str, tmp_path: Path) -> None:
    """One that died with its process could not say so."""
    spec, client = spec_of(store, "died"), client_of(store)
    sweep, _, run_id = searched(tmp_path, spec, 1e9)
    for state, status, parent in (
        ("done", "RUNNING", "FAILED"),  # its last rows are still to come
        ("failed", "KILLED", "FAILED"),
        ("not ended", "KILLED", "KILLED"),
    ):
        client.update_run(run_id, "RUNNING")
        found = {"trials": [{"trial": "0000", "state": state, "runs": ["0000"]}], "best": None, "steps": 3}
        assert mlflow_search.publish(spec.name, spec.tracking, spec.tune, sweep, found) is None
        logged = client.get_run(run_id)
        assert logged.info.status == status
        assert client.get_run(logged.data.tags["mlflow.parentRunId"]).info.status == parent

"""A search on an MLflow server: a parent run, its trials nested, the best model registered."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from orchestrator.control.background_export import LONGEST
from orchestrator.job.spec import JobSpec
from orchestrator.job.tune import TuneSpec
from orchestrator.storage.run_directory import RunDir
from orchestrator.track.mlflow_run import PARENT_TAG, URI_TAG, MlflowRun, quotable, within
from orchestrator.track.redact import redact
from orchestrator.track.registry import Candidate, register

DOCUMENTS = ("job.yaml", "sweep.json", "report.html", "best.yaml")
PATIENCE = 300.0
"""Seconds that the end of a search waits for a server; what it missed is sent by the same command."""


def publish(spec: JobSpec, sweep: RunDir, found: dict[str, Any]) -> str | None:
    """Bring the MLflow server up to date with sweep.json. Never raises: returns what went wrong in a line, or None."""
    if spec.tracking is None:
        return None
    registers = spec.tune is not None and spec.tune.register_as
    timeout = PATIENCE + (LONGEST if registers else 0.0)
    try:
        within(timeout, lambda: _publish(spec, sweep, found))
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except Exception as error:  # whatever MLflow and its transport raise
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return None


def _publish(spec: JobSpec, sweep: RunDir, found: dict[str, Any]) -> None:
    assert spec.tracking is not None
    assert spec.tune is not None
    uri, experiment = spec.tracking.uri, spec.tracking.experiment
    born = sweep.rows("trials.jsonl")[0]["time"]
    parent = MlflowRun(uri, experiment, spec.name, sweep.uri, born, spec.tune.model_dump(mode="json"))
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    where = [client.get_run(parent.run_id).info.experiment_id]
    runs: dict[str, str] = {}
    for name in (run for trial in found["trials"] for run in trial["runs"]):
        wanted = f"tags.`{URI_TAG}` = '{quotable(redact(sweep.at(name)))}'"
        for logged in client.search_runs(where, wanted):
            runs[name] = logged.info.run_id
            client.set_tag(logged.info.run_id, PARENT_TAG, parent.run_id)
    for name in DOCUMENTS:
        if (text := sweep.read_text(name)) is not None:
            parent.log_document(name, text)
    best = found["best"]
    ended = all(trial["state"] != "not ended" for trial in found["trials"])
    parent.set_status("KILLED" if not ended else "FAILED" if best is None else "FINISHED")
    if best is not None:
        client.log_metric(parent.run_id, f"best_{found['metric']}", best["value"])
        client.set_tag(parent.run_id, "best_trial", best["trial"])
        if spec.tune.register_as and ended and best["run"] in runs:
            _register(client, spec.tune, sweep, best, runs[best["run"]])


def _register(client: Any, tune: TuneSpec, sweep: RunDir, best: dict[str, Any], run_id: str) -> None:
    """Register the model of the best commit as a version, with the metric of the search."""
    from orchestrator.export.hugging_face import export

    def source() -> str:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "model"
            export(sweep.at(best["run"]), best["step"], str(target))
            client.log_artifacts(run_id, str(target), "model")
        return f"{client.get_run(run_id).info.artifact_uri}/model"

    model = Candidate(best["step"], tune.metric, best["value"], larger=tune.mode == "max")
    register(client, str(tune.register_as), run_id, model, source, trial=best["trial"])

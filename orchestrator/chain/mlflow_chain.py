"""A chain on an MLflow server: a parent run, with the runs of its stages nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.chain.stage_run import StageRun
from orchestrator.job.chain import ChainSpec
from orchestrator.job.outcome import Outcome
from orchestrator.job.tracking import TrackingSpec
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.run_directory import REPORT, RunDir
from orchestrator.track.mlflow_run import PARENT_TAG, URI_TAG, MlflowRun, quotable, within
from orchestrator.track.redact import redact
from orchestrator.track.tracker import MLFLOW_STATUS

DOCUMENTS = ("job.yaml", CHAIN, REPORT)
PATIENCE = 60.0
"""Seconds that the end of a chain waits for a server; what it missed is sent by `orchestrator report`."""


def publish(
    chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir, found: Mapping[str, Any]
) -> str | None:
    """Bring the MLflow server up to date with chain.json. Never raises: returns what went wrong in a line, or None."""
    tracked = [stage for stage in stages.values() if stage.job.tracking]
    if not tracked or tracked[0].job.tracking is None:
        return None
    tracking = tracked[0].job.tracking
    try:
        within(PATIENCE, lambda: _publish(chain, tracked, tracking, root, found))
    except TimeoutError:
        return f"no answer within {PATIENCE:g} s"
    except Exception as error:  # whatever MLflow and its transport raise
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return None


def _publish(
    chain: ChainSpec,
    stages: list[StageRun],
    tracking: TrackingSpec,
    root: RunDir,
    found: Mapping[str, Any],
) -> None:
    params = {stage.name: {"needs": ", ".join(stage.stage.needs)} for stage in stages}
    parent = MlflowRun(
        tracking.uri, tracking.experiment, chain.name, root.uri, found["started"], {"stages": params}
    )
    client = parent.client
    where = [client.get_run(parent.run_id).info.experiment_id]
    for stage in stages:
        wanted = f"tags.`{URI_TAG}` = '{quotable(redact(stage.run.uri))}'"
        for logged in client.search_runs(where, wanted):
            client.set_tag(logged.info.run_id, PARENT_TAG, parent.run_id)
    for each in found["stages"]:
        if each["loss"] is not None:
            client.log_metric(parent.run_id, f"{each['stage']}.loss", each["loss"])
    for name in DOCUMENTS:
        if (text := root.read_text(name)) is not None:
            parent.log_document(name, text)
    wrong = "FAILED" if found["state"] == Outcome.WRONG_INPUT else "RUNNING"
    parent.set_status(MLFLOW_STATUS.get(found["state"], wrong), found["ended"])

"""Copy a chain to an MLflow server: a parent run with the runs of its stages nested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from orchestrator.chain.stage_run import StageRun
from orchestrator.config.chain import ChainSpec
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import redact
from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.mlflow_delivery import MLFLOW_STATUS
from orchestrator.observe.mlflow_parent import Follower, ParentRun
from orchestrator.observe.mlflow_run import within
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.run_directory import REPORT, RunDir

JOB = "job.yaml"
DOCUMENTS = (JOB, CHAIN, REPORT)
PATIENCE = 60.0
"""Seconds that the end of a chain waits for a server. `orchestrator report` sends the rest later."""


def followed(
    chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir
) -> AbstractContextManager[object]:
    """Return a context in which the MLflow run of a chain is kept up to date. chain.json must exist."""
    tracking = _tracking(stages)
    if tracking is None:
        return contextlib.nullcontext()

    def begin() -> ParentRun:
        parent = _parent(chain, stages, tracking, root, root.read_json_or_empty(CHAIN))
        parent.set_status("RUNNING")
        parent.log_documents([JOB])
        return parent

    return Follower(begin, lambda parent: _update(parent, stages, root.read_json_or_empty(CHAIN)))


def publish(
    chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir, progress: Mapping[str, Any]
) -> str | None:
    """Bring the MLflow server up to date with chain.json. Never raises: returns a line about what failed, or None."""
    tracking = _tracking(stages)
    if tracking is None:
        return None
    try:
        within(PATIENCE, lambda: _publish(_parent(chain, stages, tracking, root, progress), stages, progress))
    except TimeoutError:
        return f"no answer within {PATIENCE:g} s"
    except Exception as error:  # whatever MLflow and its transport raise
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return None


def _tracking(stages: Mapping[str, StageRun]) -> TrackingSpec | None:
    return next((stage.job.tracking for stage in stages.values() if stage.job.tracking), None)


def _parent(
    chain: ChainSpec,
    stages: Mapping[str, StageRun],
    tracking: TrackingSpec,
    root: RunDir,
    progress: Mapping[str, Any],
) -> ParentRun:
    """The MLflow run of a chain. An earlier chain in the same directory has a different one, by its start time."""
    tracked = [stage for stage in stages.values() if stage.job.tracking]
    params = {stage.name: {"needs": ", ".join(stage.stage.needs)} for stage in tracked}
    return ParentRun(tracking, chain.name, root, progress["started"], {"stages": params})


def _update(parent: ParentRun, stages: Mapping[str, StageRun], progress: Mapping[str, Any]) -> None:
    parent.nest(stage.run for stage in stages.values() if stage.job.tracking)
    ended = sum(each["state"] == Outcome.DONE for each in progress["stages"])
    figures = {f"{each['stage']}.loss": each["loss"] for each in progress["stages"]}
    figures |= {
        f"{row['export']}.{name}": value
        for row in progress.get("exports", ())
        for name, value in _of_export(row)
    }
    parent.log_figures(figures, ended)


def _of_export(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what was measured of an export, by name."""
    yield f"export_{row['metric']}", row["metrics"][row["metric"]]
    yield "export_share", row["share"]
    yield "export_weights_bytes", row["weights_bytes"]
    yield "export_memory_bytes", row["memory_bytes"]
    for speed in row["speeds"]:
        yield f"export_p50_seconds_batch_{speed['batch']}", speed["p50_seconds"]


def _publish(parent: ParentRun, stages: Mapping[str, StageRun], progress: Mapping[str, Any]) -> None:
    _update(parent, stages, progress)
    parent.log_documents(DOCUMENTS)
    wrong = "FAILED" if progress["state"] == Outcome.WRONG_INPUT else "RUNNING"
    parent.set_status(MLFLOW_STATUS.get(progress["state"], wrong), progress["ended"])

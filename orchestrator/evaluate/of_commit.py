"""Evaluate a commit after its run, or during it, by the rank program in one process of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.workers.gang import Bundle
from cluster.workers.run_local_gang import run_to_the_end
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.resources import PerWorker
from orchestrator.config.spec import JobSpec
from orchestrator.observe.console import shown_work
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.commit_task import inputs_of_commit
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY, EVALUATION_PATIENCE, Task


def evaluate_commit(
    spec: JobSpec, run: RunDir, commit: CommitManifest, sets: Mapping[str, str], raw: bool = False
) -> EvaluationRow:
    """Return the metrics of a commit on held-out text. The run is not changed.

    Args:
        spec: the job, which names the held-out text.
        run: the run directory.
        commit: the manifest of the commit.
        sets: the URIs of the prepared sets that have text of their own, by name.
        raw: whether to evaluate the weights of training instead of their average, if the job has one.

    Raises:
        InputError: the prepared data is missing.
        RuntimeError: the evaluation fails.
    """
    inputs = inputs_of_commit(
        run,
        commit,
        spec.run_identity,
        workload=spec.workload,
        data=spec.data,
        reads_base=spec.reads_base,
    )
    if raw:
        trained = spec.checkpoint.model_copy(update={"average": None})
        spec = spec.model_copy(update={"checkpoint": trained})
    size = Layout.from_json(commit.meta["layout"]).micro_batch
    task = Task.for_evaluation(
        spec.model_dump(mode="json"), size, restore=commit.step, sets=dict(sets), **inputs
    )
    return row_of(spec.resources.per_worker, task)


def row_of(worker: PerWorker, task: Task) -> EvaluationRow:
    """Run an evaluation on this machine, show its progress on standard error, and return its row.

    Args:
        worker: the resources of the process.
        task: what to evaluate.

    Raises:
        RuntimeError: it fails.
    """
    result = run_shown(worker.bundle, ENTRY, task.to_json(), EVALUATION_PATIENCE, work="evaluation")
    row: EvaluationRow = result["evaluation"]
    return row


def run_shown(bundle: Bundle, entry: str, config: dict[str, Any], patience: float, *, work: str) -> Any:
    """Run an evaluation in one process of this machine, and show its progress on standard error.

    For the arguments see `run_to_the_end`.

    Returns:
        The result of the entry point.

    Raises:
        RuntimeError: it fails, or makes no progress.
    """
    with shown_work("evaluate") as show:
        return run_to_the_end(1, bundle, entry, config, patience=patience, work=work, show=show)[1]

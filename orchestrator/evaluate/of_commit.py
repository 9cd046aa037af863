"""A commit evaluated after its run, or beside it: by the rank program, in one process of this machine."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.workers.to_the_end import run_to_the_end
from orchestrator.checkpoint.identity import check_commit, check_shards
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.job.spec import JobSpec
from orchestrator.planning.layout import Layout
from orchestrator.resolve.prepared_data import tokens_of
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY, Task

PATIENCE = 900.0
"""Seconds that the model may take to be read, or a global batch to be evaluated."""


def evaluate_commit(
    spec: JobSpec, run: RunDir, commit: CommitManifest, sets: Mapping[str, str], raw: bool = False
) -> EvaluationRow:
    """The metrics of a commit on the held-out text that `spec` names; `sets` are the URIs of what has text of its own.

    They are of the weights' average, if the job has one, unless `raw`.
    Nothing of the run is changed. Raises InputError if its data is gone, RuntimeError if the evaluation fails.
    """
    check_commit(commit, spec, run.at("job.yaml"))
    tokens = tokens_of(spec, run, commit.meta["data"])
    check_shards(commit, tokens.manifest.digest, tokens.folder.uri)
    if raw:
        trained = spec.checkpoint.model_copy(update={"average": None})
        spec = spec.model_copy(update={"checkpoint": trained})
    # One process has any layout's numbers; its micro-batch is what fitted a rank's memory.
    layout = Layout(micro_batch=Layout.from_json(commit.meta["layout"]).micro_batch)
    task = Task(
        job=spec.model_dump(mode="json"),
        layout=layout.to_json(),
        run=run.uri,
        data=tokens.folder.uri,
        attempt=0,
        restore=commit.step,
        until=commit.step,
        commit=False,
        evaluate_only=True,
        sets=dict(sets),
    )
    bundle = spec.resources.per_worker.bundle
    _, result = run_to_the_end(1, bundle, ENTRY, task.to_json(), PATIENCE, "evaluation")
    row: EvaluationRow = result["evaluation"]
    return row

"""The evaluation of a commit: in its manifest if the ranks evaluated it, else in a file that is added to its folder.

The manifest says whether the commit is to be evaluated beside the run. The file holds the row of evals.jsonl with its
checksum. It counts only for the commit of the same attempt, because a step may be committed again after a rollback.
The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest, commit_folder
from orchestrator.config.metric_names import by_name
from orchestrator.storage.file_names import EVALUATION
from orchestrator.storage.row_line import EVALS, Row, decode, encode

if TYPE_CHECKING:  # the process that writes commits imports this module and no job files
    from orchestrator.evaluate.config import EvaluateSpec


TO_EVALUATE = "to_evaluate"
"""Key of a manifest's meta: whether the commit is to be evaluated beside the run."""
MEASURED = "measured"
"""Key of a manifest's meta and of an evaluation's row: how the job measures, see `measure_of`."""


def measure_of(evaluate: EvaluateSpec | None, averaged: int) -> dict[str, int | None]:
    """Return the settings that change the values of evaluations and that a job may change during its run.

    These are the number of global batches that are read of a set, the number of commits that the weights are averaged
    over, and the number of answers that are drawn to a prompt, if any. Values under different settings are not
    compared.

    Args:
        evaluate: the key `evaluate` of the job; None without.
        averaged: earlier commits that are averaged with the evaluated one.
    """
    batches = evaluate.batches if evaluate else None
    result = {"batches": batches, "averaged": averaged if evaluate and evaluate.where == "beside" else 0}
    return result | ({"answers": evaluate.answers} if evaluate and evaluate.answers else {})


def attach(store: Store, row: Row) -> None:
    """Add the row of an evaluation to the commit of its step, which must exist. Raises what storage raises.

    Args:
        store: the store of the run's commits.
        row: the row, as in evals.jsonl.
    """
    store.retry(store.backend.replace, _path(row["step"]), encode(row))


def is_of(row: Row, commit: CommitManifest) -> bool:
    """Return whether a row belongs to this commit, and not to a commit of the same step in another attempt.

    Args:
        row: the row of an evaluation.
        commit: the manifest of the commit.
    """
    return (row["step"], row["attempt"]) == (commit.step, commit.meta.get("attempt"))


def attached(store: Store, commit: CommitManifest) -> Row | None:
    """Return the row that was added to a commit; None without one, or if it is damaged.

    Args:
        store: the store of the run's commits.
        commit: the manifest of the commit.
    """
    try:
        row = decode(store.retry(store.backend.read, _path(commit.step)).strip(), EVALS)
    except FileNotFoundError:
        return None
    return row if row is not None and is_of(row, commit) else None


def metrics_of(store: Store, commit: CommitManifest) -> Mapping[str, Any]:
    """Return the metrics of a commit by name, such as validation.loss; empty if it was not evaluated.

    Args:
        store: the store of the run's commits.
        commit: the manifest of the commit.
    """
    return evaluated(store, commit)[0]


def evaluated(store: Store, commit: CommitManifest) -> tuple[Mapping[str, Any], Any]:
    """Return the metrics of a commit, see `metrics_of`, and how they were measured, None if that is unknown.

    Args:
        store: the store of the run's commits.
        commit: the manifest of the commit.
    """
    if commit.meta.get("last_evaluation_step") == commit.step:
        return dict(commit.meta.get("evaluation", {})), commit.meta.get(MEASURED)
    row = attached(store, commit) if commit.meta.get(TO_EVALUATE) else None
    return (by_name(row["sets"]), row.get(MEASURED)) if row else ({}, None)


def awaits(store: Store, commit: CommitManifest) -> bool:
    """Return whether the commit is to be evaluated, and has not been.

    Args:
        store: the store of the run's commits.
        commit: the manifest of the commit.
    """
    return bool(commit.meta.get(TO_EVALUATE)) and attached(store, commit) is None


def _path(step: int) -> str:
    return f"{commit_folder(step)}/{EVALUATION}"

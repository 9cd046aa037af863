"""What a commit stores besides tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.checkpoint.evaluations import MEASURED, TO_EVALUATE
from orchestrator.checkpoint.identity import (
    BASE,
    CLASS_WEIGHTS,
    CLEANED_BY,
    CODE,
    CONTINUED,
    IDENTITY,
    KEPT,
    SHARDS,
    TEACHER,
    TILES,
)
from orchestrator.checkpoint.manifest import VERIFIED
from orchestrator.parallel.arithmetic import ARITHMETIC
from orchestrator.parallel.layout import Layout
from orchestrator.storage.row_line import Row
from orchestrator.train.task import Task

CARRIED = (
    "last_evaluation_step",
    "evaluation",
    "best",
    "stale",
    "best_of",
    ARITHMETIC,
    CONTINUED,
    VERIFIED,
)
"""Fields of a run's progress that a commit stores in its meta under the same names."""


def meta_of(
    progress: Mapping[str, Any],
    task: Task,
    layout: Layout,
    *,
    identity: Mapping[str, Any],
    is_evaluated: bool,
    measured: Mapping[str, Any],
    losses: Sequence[float],
    rows: Sequence[Row],
) -> dict[str, Any]:
    """Return the meta of a commit.

    Args:
        progress: the fields of a `TrainingProgress`.
        task: what the gang does.
        layout: how its ranks divide the work.
        identity: what makes two runs the same run, see `JobSpec.identity`.
        is_evaluated: whether a separate task evaluates the commit.
        measured: the settings that change the values of evaluations.
        losses: of the steps since the last commit.
        rows: of metrics.jsonl that are not stored yet, so that none is lost if the run is killed right after the
            commit.
    """
    return {
        "position": progress["position"],
        "receipt": progress["receipt"],
        "tokens": progress["tokens"],
        "losses": progress["losses"],
        "skips": progress["skips"],
        **{key: progress[key] for key in CARRIED},
        TO_EVALUATE: is_evaluated,
        MEASURED: measured,
        "attempt": task.attempt,
        "layout": layout.to_json(),
        "engine": layout.engine,
        "seed": identity["seed"],
        IDENTITY: identity,
        "data": task.data,
        "sets": task.sets,
        SHARDS: task.shards,
        BASE: task.base,
        KEPT: task.folder_config,
        CODE: task.code,
        CLEANED_BY: task.cleaned_by,
        TILES: True,
        **({TEACHER: task.teacher} if task.teacher else {}),
        **({CLASS_WEIGHTS: task.class_weights} if task.class_weights else {}),
        "loss": sum(losses) / len(losses) if losses else None,
        "rows": rows,
    }

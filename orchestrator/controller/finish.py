"""Finish a run: write its summary and its report, and bring MLflow up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.workers.clock import wall
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.retention import best_commit
from orchestrator.config.metric_names import by_name, larger_is_better
from orchestrator.config.outcome import Outcome
from orchestrator.controller.run_history import RunHistory
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.models.pinned_base import release_base, release_teacher
from orchestrator.observe.config import SummarisedJob, TrackedJob, TrackingSpec
from orchestrator.observe.goodput import with_end
from orchestrator.observe.mlflow_client import SQLITE
from orchestrator.observe.mlflow_delivery import MLFLOW_STATUS
from orchestrator.observe.registry import register_export
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import RunTotals, is_number
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import RunDir

SERVER_PATIENCE = 20.0
"""Seconds that the end of a run waits for a tracking server. `orchestrator report` can send the rest later."""
DATABASE_PATIENCE = 120.0
"""Seconds to wait for a database file. This process creates its tables, which takes long on a busy machine."""


def finish(
    job: SummarisedJob,
    run: RunDir,
    history: RunHistory,
    data: str,
    exported: dict[str, Any],
    rows: RunTotals,
    *,
    tracked: TrackedJob,
    checkpoint: CheckpointSpec,
    evaluate: EvaluateSpec | None,
    needs_base: bool,
) -> dict[str, Any]:
    """Write summary.json and report.html, deliver what MLflow lacks, and return the summary.

    Args:
        job: what the summary says of the job.
        run: the run directory.
        history: the record of the run.
        data: the URI of the prepared data, empty if the run never had any.
        exported: what the last export returned, empty without one.
        rows: the totals of all rows.
        tracked: what MLflow shows of the job, and where.
        checkpoint: which commit is the best.
        evaluate: how the job evaluates; None without evaluations.
        needs_base: whether the run holds the weights that it began with.
    """
    history.trace.end()
    history.files.wait_until_stored()
    # Snapshots in memory do not count, because they end with the run.
    commit = history.commits.store.latest(deep=False)
    tracker = history.copies.tracker
    result = summary(
        job,
        run.read_json_or_empty("plan.json") or None,
        run.rows(EVENTS),
        rows,
        {"samples": commit.receipt} if commit else None,
        unigram_entropy=_entropy(run, data),
        sample=exported.get("sample"),
    )
    result["commit"] = commit.step if commit else None
    result["export"] = {k: v for k, v in exported.items() if k != "sample"} or None
    result["best_without_commit"] = best_without_commit(checkpoint, evaluate, run, rows)
    if result["state"] == Outcome.DONE:
        release_base(needs_base, run, history.base)
        release_teacher(run, history.teacher)
    result["problem"] = result["reason"] if result["state"] == Outcome.FAILED else None
    run.write_json("summary.json", result)
    not_drawn = draw(run, lambda run: _report(run, rows))
    result["problem"] = result["problem"] or not_drawn
    tracker.document("summary.json")
    tracker.document("report.html")
    tracker.status(MLFLOW_STATUS[result["state"]])
    delivery = tracker.close(_patience(tracked.tracking))
    problem = delivery.problem or register_export(
        tracked.name, tracked.tracking, checkpoint, tracked.parameters, run
    )
    refused = {"refused": delivery.line} if delivery.line else {}
    result["tracking"] = {"missing_rows": delivery.missing, "problem": problem, **refused}
    result["ledger"] = with_end(result["ledger"], finish=wall() - (result["ended"] or wall()))
    run.write_json("summary.json", result)
    return result


def _patience(tracking: TrackingSpec | None) -> float:
    in_a_file = tracking is not None and SQLITE.fullmatch(tracking.uri)
    return DATABASE_PATIENCE if in_a_file else SERVER_PATIENCE


def draw(run: RunDir, report: Callable[[RunDir], str]) -> str | None:
    """Write report.html. Return why that failed, None if it did not: a report must not fail a run or a search."""
    try:
        run.write_text("report.html", report(run))
    except Exception as error:
        return f"report.html was not written: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _report(run: RunDir, rows: RunTotals) -> str:
    from orchestrator.observe.pages.report import report

    return report(run, rows)


def _entropy(run: RunDir, data: str) -> float | None:
    """Return the entropy of single tokens of the prepared data, in nats; None if it is unknown."""
    if not data:
        return None
    from orchestrator.resolve.prepared_data import data_of

    manifest = data_of(run, data).manifest
    return None if manifest.own else manifest.entropy


def best_without_commit(
    checkpoint: CheckpointSpec, evaluate: EvaluateSpec | None, run: RunDir, rows: RunTotals
) -> str | None:
    """Return a line about a step that was better than the best commit but was not committed; None without one."""
    metric, measured = checkpoint.best_metric, measure_of(evaluate, checkpoint.averaged)
    if metric is None or (best_committed := best_commit(Store(run.commits), metric)) is None:
        return None
    sign = -1.0 if larger_is_better(metric) else 1.0
    comparable = [row for row in rows.evaluations if row.get("measured", measured) == measured]
    measured_values: dict[int, Any] = {row["step"]: by_name(row["sets"]).get(metric) for row in comparable}
    values = {step: value for step, value in measured_values.items() if is_number(value)}
    best = min(values, key=lambda step: (sign * values[step], step), default=best_committed)
    if best_committed not in values or sign * values[best] >= sign * values[best_committed]:
        return None
    text = f"{metric} was best at step {best} ({values[best]:.4g}), which has no commit: the best commit is that of "
    return f"{text}step {best_committed} ({values[best_committed]:.4g}); let checkpoint.every and evaluate.every meet"

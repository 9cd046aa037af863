"""The end of a run: summary and report written, MLflow brought up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.workers.clock import wall
from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.retention import best_commit
from orchestrator.checkpoint.store import Store
from orchestrator.config.metric_names import by_name, larger_is_better
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec
from orchestrator.controller.run_history import RunHistory
from orchestrator.observe.goodput import with_end
from orchestrator.observe.mlflow_client import SQLITE
from orchestrator.observe.registry import register_export
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import RunTotals, is_number
from orchestrator.observe.tracker import MLFLOW_STATUS
from orchestrator.resolve.pinned_base import release_base
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import RunDir

SERVER_PATIENCE = 20.0
"""Seconds that the end of a run waits for a tracking server; what it missed can be sent by `orchestrator report`."""
DATABASE_PATIENCE = 120.0
"""Seconds for a database file: this process makes its tables itself, which takes a busy machine long."""


def finish(
    spec: JobSpec,
    run: RunDir,
    history: RunHistory,
    data: str,
    exported: dict[str, Any],
    rows: RunTotals,
) -> dict[str, Any]:
    """Write summary.json and report.html, deliver what MLflow lacks, and return the summary."""
    history.trace.end()
    history.settle()
    commit = history.store.latest(deep=False)  # not of the memory of nodes, which ends with the run
    tracker = history.tracker
    found = summarise(spec, run, commit, data, exported, rows)
    if found["state"] == Outcome.DONE:
        release_base(spec, run, history.base)
    found["problem"] = found["reason"] if found["state"] == Outcome.FAILED else None
    run.write_json("summary.json", found)
    not_drawn = draw(run, lambda run: _report(run, rows))
    found["problem"] = found["problem"] or not_drawn
    tracker.document("summary.json")
    tracker.document("report.html")
    tracker.status(MLFLOW_STATUS[found["state"]])
    delivery = tracker.close(_patience(spec))
    problem = delivery.problem or register_export(spec, run)
    refused = {"refused": delivery.line} if delivery.line else {}
    found["tracking"] = {"missing_rows": delivery.missing, "problem": problem, **refused}
    found["ledger"] = with_end(found["ledger"], finish=wall() - (found["ended"] or wall()))
    run.write_json("summary.json", found)
    return found


def _patience(spec: JobSpec) -> float:
    in_a_file = spec.tracking is not None and SQLITE.fullmatch(spec.tracking.uri)
    return DATABASE_PATIENCE if in_a_file else SERVER_PATIENCE


def draw(run: RunDir, report: Callable[[RunDir], str]) -> str | None:
    """Write report.html; what went wrong if it could not be drawn, since telemetry may not fail a run or a search."""
    try:
        run.write_text("report.html", report(run))
    except Exception as error:
        return f"report.html was not written: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _report(run: RunDir, rows: RunTotals) -> str:
    from orchestrator.observe.report import report

    return report(run, rows)


def summarise(
    spec: JobSpec,
    run: RunDir,
    commit: CommitManifest | None,
    data: str,
    exported: dict[str, Any],
    rows: RunTotals,
) -> dict[str, Any]:
    """The summary of what stands in the run directory."""
    entropy = None
    if data:
        from orchestrator.resolve.prepared_data import data_of

        found_data = data_of(run, data).manifest
        entropy = None if found_data.own else found_data.entropy
    found = summary(
        spec,
        run.read_json_or_empty("plan.json") or None,
        run.rows(EVENTS),
        rows,
        {"samples": commit.receipt} if commit else None,
        unigram_entropy=entropy,
        sample=exported.get("sample"),
    )
    found["commit"] = commit.step if commit else None
    found["export"] = {k: v for k, v in exported.items() if k != "sample"} or None
    found["best_without_commit"] = best_without_commit(spec, run, rows)
    return found


def best_without_commit(spec: JobSpec, run: RunDir, rows: RunTotals) -> str | None:
    """A line about a better evaluation than that of the best commit, if its step was not committed."""
    metric, measured = spec.checkpoint.best_metric, measure_of(spec)
    if metric is None or (kept := best_commit(Store(run.commits), metric)) is None:
        return None
    sign = -1.0 if larger_is_better(metric) else 1.0
    alike = [row for row in rows.evaluations if row.get("measured", measured) == measured]
    told: dict[int, Any] = {row["step"]: by_name(row["sets"]).get(metric) for row in alike}
    values = {step: value for step, value in told.items() if is_number(value)}
    best = min(values, key=lambda step: (sign * values[step], step), default=kept)
    if kept not in values or sign * values[best] >= sign * values[kept]:
        return None
    text = f"{metric} was best at step {best} ({values[best]:.4g}), which has no commit: the best commit is that of "
    return f"{text}step {kept} ({values[kept]:.4g}); let checkpoint.every and evaluate.every meet"

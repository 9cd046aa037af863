"""Rows that a run's directory lacks, found on the tracking server."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.mlflow_delivery import rows_on_server
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.row_log import RowLog, steps_text
from orchestrator.storage.run_directory import RunDir

SERVER_PATIENCE = 60.0
"""Seconds to wait for a tracking server to return the rows that it has."""


MOST = 100_000
"""The largest number of rows to request from a tracking server."""


Gaps = Sequence[tuple[int, int]]
"""Ranges of steps, each as its first and its last step."""


def find(
    name: str,
    tracking: TrackingSpec | None,
    run: RunDir,
    log: RowLog,
    store: Store,
    events: Sequence[Row],
    missing: Gaps,
) -> dict[int, Row]:
    """Find copies of lost rows of metrics.jsonl.

    Three sources are tried in order: rows that are in the file but out of order, the rows that the kept commits carry,
    and the metrics in MLflow. MLflow holds numbers only, so the text fields of its rows come from events and commits.

    Args:
        name: the name of the job.
        tracking: the tracking server.
        run: the run directory.
        log: the row log of metrics.jsonl.
        store: the commits of the run.
        events: the rows of events.jsonl.
        missing: the steps whose rows are lost.

    Returns:
        The rows that were found, by step.
    """
    rows = {row["step"]: row for row in log.rows() if _among(row["step"], missing)}
    receipts = {}
    for step in store.steps():
        try:
            commit = store.manifest(step)
        except CorruptCommit:
            continue
        receipts[step] = commit.receipt
        carried = commit.meta.get("rows") or []
        rows |= {row["step"]: row for row in carried if _among(row["step"], missing)}
    remaining = without(missing, rows)
    if remaining and tracking and sum(last - first + 1 for first, last in remaining) <= MOST:
        layouts = {e["attempt"]: str(e["layout_after"]) for e in events if e.get("layout_after")}
        for row in rows_on_server(name, tracking, run, remaining, SERVER_PATIENCE):
            rows[row["step"]] = _completed(row, layouts, receipts)
    return rows


def recovered(missing: Gaps, rows: dict[int, Row]) -> tuple[list[list[int]], str]:
    """Return the gaps that remain after `rows` were recovered, and a line for the event that reports them."""
    remaining = [list(gap) for gap in without(missing, rows)]
    reason = f"rows of step {steps_text(missing)} were lost from {METRICS}: {len(rows)} recovered"
    if remaining:
        reason += f"; step {steps_text(remaining)} cannot be recovered"
    return remaining, reason


def without(missing: Gaps, rows: dict[int, Row]) -> list[tuple[int, int]]:
    """Return the gaps in `missing` that `rows` do not fill."""
    gaps: list[tuple[int, int]] = []
    for first, last in missing:
        for step in (step for step in range(first, last + 1) if step not in rows):
            if gaps and gaps[-1][1] == step - 1:
                gaps[-1] = (gaps[-1][0], step)
            else:
                gaps.append((step, step))
    return gaps


def _completed(row: Row, layouts: dict[int, str], receipts: dict[int, str]) -> Row:
    """Add the text fields to a row from MLflow, which stores numbers only."""
    return {
        **row,
        "samples": receipts.get(row["step"]),
        "layout": layouts.get(row["attempt"]),
        "copied_from": "mlflow",
    }


def _among(step: int, gaps: Gaps) -> bool:
    return any(first <= step <= last for first, last in gaps)

"""Rows of a run that storage has lost, deleted or cut out by whatever: found again where there is another copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.store import Store
from orchestrator.config.spec import JobSpec
from orchestrator.observe.tracker import rows_on_server
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.row_log import RowLog, steps_text
from orchestrator.storage.run_directory import RunDir

PATIENCE = 60.0
"""Seconds that are given to a tracking server to tell what it has."""
MOST = 100_000
"""Rows that are asked of it at most."""

Gaps = Sequence[tuple[int, int]]


def find(
    spec: JobSpec, run: RunDir, log: RowLog, store: Store, events: Sequence[Row], missing: Gaps
) -> dict[int, Row]:
    """Rows of missing steps: those that are in the file, but not in their place; as the kept commits carry them; and
    else what MLflow has of them, which is their numbers."""
    found = {row["step"]: row for row in log.rows() if _among(row["step"], missing)}
    receipts = {}
    for step in store.steps():
        try:
            commit = store.manifest(step)
        except CorruptCommit:
            continue
        receipts[step] = commit.receipt
        carried = commit.meta.get("rows") or []
        found |= {row["step"]: row for row in carried if _among(row["step"], missing)}
    left = without(missing, found)
    if left and spec.tracking and sum(last - first + 1 for first, last in left) <= MOST:
        layouts = {e["attempt"]: str(e["layout_after"]) for e in events if e.get("layout_after")}
        for row in rows_on_server(spec, run, left, PATIENCE):
            found[row["step"]] = _completed(row, layouts, receipts)
    return found


def recovered(missing: Gaps, found: dict[int, Row]) -> tuple[list[list[int]], str]:
    """The gaps that are left of the missing rows, and a line that tells of them."""
    left = [list(gap) for gap in without(missing, found)]
    reason = f"rows of step {steps_text(missing)} were lost from {METRICS}: {len(found)} are found again"
    return left, reason + (f", and those of step {steps_text(left)} are not" if left else "")


def without(missing: Gaps, found: dict[int, Row]) -> list[tuple[int, int]]:
    """What is still missing."""
    left: list[tuple[int, int]] = []
    for first, last in missing:
        for step in (step for step in range(first, last + 1) if step not in found):
            if left and left[-1][1] == step - 1:
                left[-1] = (left[-1][0], step)
            else:
                left.append((step, step))
    return left


def _completed(row: Row, layouts: dict[int, str], receipts: dict[int, str]) -> Row:
    """A row of MLflow with what can be said of its texts."""
    known: dict[str, Any] = {"samples": receipts.get(row["step"]), "layout": layouts.get(row["attempt"])}
    return {**row, **known, "copied_from": "mlflow"}


def _among(step: int, gaps: Gaps) -> bool:
    return any(first <= step <= last for first, last in gaps)

"""Options of the command plan: a page of a plan (--html), predictions compared with measurements (--audit)."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.options import emit, table
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.launch.planned_job import PlannedJob


def write_page(path: Path, planned: PlannedJob) -> None:
    """Write the page of a plan. Raises InputError."""
    from orchestrator.observe.pages.plan_page import plan_page
    from orchestrator.planner.demand import demand_of

    plan, on_cpu = planned.plan, planned.on_cpu
    fits, needed = planned.traced.fits(plan, on_cpu), planned.traced.needed(plan.chosen.memory, on_cpu)
    try:
        spec = planned.job.spec
        path.write_text(
            plan_page(
                spec.name,
                spec.workload.model,
                demand_of(spec),
                planned.job.shape,
                plan,
                fits=fits,
                needed=needed,
                peaks=planned.traced.peaks(plan.by_stage),
                traced=not planned.traced.reasons,
            )
        )
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", str(path), "give another --html") from None


def show_audit(folder: str, as_json: bool) -> None:
    """Print predicted and measured step time and memory of all runs in a folder. Raises InputError if it has no
    run."""
    from orchestrator.observe.audit import audit_of
    from orchestrator.observe.formatting import duration
    from orchestrator.observe.pages.page import size
    from orchestrator.storage.run_directory import runs_in

    audits = []
    for run in runs_in(folder):
        try:
            row = audit_of(run)
        except InputError as error:
            print(f"orchestrator: left out: {error}", file=sys.stderr)
            continue
        audits += [row] if row else []
    if not audits:
        raise InputError(
            "no run in it was both predicted and measured", folder, "give the folder that holds runs"
        )
    errors = [abs(row["step_seconds"]["ratio"] - 1.0) for row in audits]
    mean = statistics.mean(errors)
    if as_json:
        emit({"runs": audits, "mean_error": mean})
        return

    def cells(pair: dict[str, Any], text: Any) -> list[str]:
        ratio = "" if pair["ratio"] is None else f"{pair['ratio'] - 1.0:+.0%}"
        return [*(text(pair[side]) if pair[side] else "" for side in ("predicted", "measured")), ratio]

    rows = [
        [
            row["name"],
            row["layout"] or "",
            *cells(row["step_seconds"], duration),
            *cells(row["memory_bytes"], size),
            row["memory"].get("source", "formula"),
        ]
        for row in audits
    ]
    columns = ["run", "layout", "predicted", "step", "error", "predicted", "memory", "error", "by"]
    table(f"Runs in {folder}", columns, rows)
    print(f"Step times are off by {mean:.0%} on average.")

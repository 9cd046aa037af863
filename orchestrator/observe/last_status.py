"""The latest state of a run, from the newest file that it has written."""

from __future__ import annotations

from orchestrator.config.outcome import ENDED
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.run_directory import RunDir


def last_status(run: RunDir) -> Row:
    """Return status.json of a run.

    If that is missing or damaged, return what the summary of a finished run has, or the row of the last step; empty
    without any.
    """
    status = run.read_json_or_empty("status.json")
    if status.get("phase"):
        return status
    summary = run.read_json_or_empty("summary.json")
    if summary.get("state") in ENDED:
        told = {key: summary.get(key) for key in ("name", "step", "steps")}
        told |= {
            "phase": summary["state"],
            "time": summary.get("ended") or 0.0,
            "note": summary.get("reason"),
        }
        return told | {
            "attempt": summary.get("attempts"),
            "layout": next(reversed(summary.get("layouts") or [None])),
            "loss": summary.get("final_loss"),
        }
    row = run.log(METRICS).last() or {}
    return {key: row[key] for key in ("step", "attempt", "layout", "loss", "time") if key in row}

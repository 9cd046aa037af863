"""Where a run is, by the newest that it has written of itself."""

from __future__ import annotations

from orchestrator.config.outcome import ENDED
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.run_directory import RunDir


def last_status(run: RunDir) -> Row:
    """status.json of a run; where that is lost or damaged, as much of it as the summary of a run that has ended tells,
    or the row of its last step; empty where there is nothing."""
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

"""The latest state of a run, from the newest file that it has written, and whether its controller still runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from orchestrator.config.outcome import ENDED
from orchestrator.observe.formatting import duration
from orchestrator.storage.process_identity import has_ended
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.run_directory import RunDir

LOST = "lost"
"""The state of a run that has not ended and that no controller drives any more."""
WAITING = "waiting"
"""The state of a run that waits in the cluster's queue, or for workers."""
WAITS = ("queue", "wait")
"""The phases of such a run."""
SILENT_AFTER = 15.0
"""Seconds without a new status after which a controller counts as silent. It writes one about every second."""
GONE_AFTER = 300.0
"""Seconds without a new status after which a controller on another machine counts as gone: placing workers on new nodes
may take minutes."""


class ControllerState(StrEnum):
    """The known state of a run's controller."""

    UNKNOWN = "not heard of"
    """It has not written a status yet."""
    ALIVE = "alive"
    SILENT = "silent"
    """It has not written for a while. Its process runs, or Ray may restart it, or it is on another machine."""
    GONE = "gone"
    """Its process and the processes that started it have ended, or it is on another machine and silent for minutes."""
    ENDED = "ended"
    """The run has ended, and its controller with it."""


def controller_state(status: Row, now: float | None = None) -> ControllerState:
    """Return what a status says of the run's controller. Every command and `Run` decide by this function.

    Args:
        status: the content of status.json, or what stands for it.
        now: unix seconds, by default the present.
    """
    if status.get("phase") in ENDED:
        return ControllerState.ENDED
    if not status.get("time"):
        return ControllerState.UNKNOWN
    silence = (time.time() if now is None else now) - status["time"]
    process = _has_ended(status)
    if process or (process is None and silence > GONE_AFTER):
        return ControllerState.GONE
    return ControllerState.SILENT if silence > SILENT_AFTER else ControllerState.ALIVE


def _has_ended(status: Row) -> bool | None:
    """Whether the controller's process and its ancestors have ended; None if that cannot be known here.

    While an ancestor lives, the controller may return: Ray restarts a controller, and a command restarts Ray.
    """
    processes = status.get("processes")
    if not isinstance(processes, list) or not processes:
        return None
    try:
        ended = [has_ended(each) for each in processes]
    except (ValueError, TypeError, KeyError):
        return None
    return None if None in ended else all(ended)


def last_status(run: RunDir) -> Row:
    """Return status.json of a run, with what is known of its `controller`, as text.

    If no controller drives the run any more, its phase is LOST. If status.json is missing or damaged, return what the
    summary of a finished run has, or the row of the last step; empty without any.
    """
    status = _written(run)
    if not status:
        return status
    controller = controller_state(status)
    shown = {**status, "controller": str(controller)}
    if controller is ControllerState.SILENT:
        silence = duration(time.time() - status["time"])
        return shown | {"controller": f"{controller} for {silence}", "eta_seconds": None}
    return _lost(shown) if controller is ControllerState.GONE and status.get("phase") else shown


def state_of(status: Mapping[str, Any]) -> str:
    """Return the state of a run by its status: WAITING, or else its phase; "unknown" before it has one. Every command
    and `Run` show this."""
    phase = status.get("phase")
    return WAITING if phase in WAITS else str(phase or "unknown")


def if_lost(run: RunDir) -> dict[str, Any]:
    """Return the state and the reason of a run that no controller drives any more; empty for other runs.

    The events alone cannot distinguish such a run from one that trains.
    """
    status = last_status(run)
    return {"state": LOST, "reason": status["note"]} if status.get("phase") == LOST else {}


def _written(run: RunDir) -> Row:
    status = run.read_json_or_empty("status.json")
    if status.get("phase"):
        return status
    summary = run.read_json_or_empty("summary.json")
    if summary.get("state") in ENDED:
        known = {key: summary.get(key) for key in ("name", "step", "steps")}
        known |= {
            "phase": summary["state"],
            "time": summary.get("ended") or 0.0,
            "note": summary.get("reason"),
        }
        return known | {
            "attempt": summary.get("attempts"),
            "layout": next(reversed(summary.get("layouts") or [None])),
            "loss": summary.get("final_loss"),
        }
    row = run.log(METRICS).last() or {}
    return {key: row[key] for key in ("step", "attempt", "layout", "loss", "time") if key in row}


def _lost(status: Row) -> Row:
    """Return the status of a run whose controller is gone: without ranks and without time left."""
    silence = duration(max(time.time() - status["time"], 0.0))
    note = f"its controller is gone, last seen {silence} ago in phase {status['phase']}; the same command resumes it"
    gone = {"phase": LOST, "lost_phase": status["phase"], "note": note, "eta_seconds": None, "ranks": []}
    return {**status, **gone, "evaluation": "", "why_slow": ""}

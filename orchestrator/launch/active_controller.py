"""Find out whether a controller is active for a run, on this machine or anywhere."""

from __future__ import annotations

import time

from orchestrator.config.errors import InputError
from orchestrator.controller.stop_file import StopSender
from orchestrator.observe.last_status import GONE_AFTER, ControllerState, controller_state, last_status
from orchestrator.storage.lease import is_locked
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir

LOOKS = 5.0
"""Seconds within which an active run writes its status."""
EVERY = 0.25
"""Seconds between two reads of the status."""
STOPPED = "stopped by the user"
"""The reason of a stop that a command asks for."""
SILENCE = GONE_AFTER
"""Seconds without a new status after which a command waits for a run no longer."""
RESUMED_WITHIN = 30.0
"""Seconds that a command, given again, takes at most until its controller writes a status."""


class Signs:
    """The signs of activity of a run, for a command that waits for it."""

    def __init__(self) -> None:
        self._status_time: float | None = None
        """The time in the last status."""
        self._changed_at = time.monotonic()
        """When that time last changed."""

    def show_no_controller(self, status: Row) -> bool:
        """Whether the present status shows that no controller is active for the run; the status is empty without
        one."""
        status_time = status.get("time")
        if status_time != self._status_time:
            self._status_time = status_time
            self._changed_at = time.monotonic()
        patience = RESUMED_WITHIN if controller_state(status) is ControllerState.GONE else SILENCE
        return time.monotonic() - self._changed_at > min(patience, SILENCE)


def not_driven(run: str) -> str:
    """Return the message for a run without signs of activity."""
    return f"no controller drives {run} any more"


def refuse_if_over(run: RunDir) -> Row:
    """Return the status of a run. Raises InputError if it has ended, or if no controller drives it any more."""
    status = last_status(run)
    state = controller_state(status)
    if state is ControllerState.ENDED:
        raise InputError("this run has ended already", run.uri, "see `orchestrator status`")
    if state is ControllerState.GONE:
        raise InputError("no controller drives this run any more", run.uri, "the same command resumes it")
    return status


def ask_to_stop(run: RunDir) -> StopSender:
    """Ask the controller of a run to save a checkpoint and end, by a file in the run directory. Returns at once.

    Raises:
        InputError: the run has ended or has no controller, or its controller cannot be asked this way.
    """
    status = refuse_if_over(run)
    request = StopSender(run, STOPPED)
    if not request.ask(status):
        problem = "its controller has written no status yet, or is of a version that reads no request to stop"
        raise InputError(problem, run.uri, "give the command again, or press Ctrl-C in its terminal")
    return request


def refuse_if_active(run_dir: RunDir, *stages: RunDir) -> None:
    """Raise InputError if another command of this machine drives the run, or the chain with these `stages`.

    Such a run is locked and its status changes. The lock alone proves nothing, because the lock of a command that was
    just killed is held a little longer.
    """
    before = None
    deadline = time.monotonic() + LOOKS
    while run_dir.local and is_locked(run_dir.path) and time.monotonic() < deadline:
        times = [folder.read_json_or_empty("status.json").get("time") for folder in stages or (run_dir,)]
        if before is not None and times != before:
            hint = "wait for its end, or press Ctrl-C in its terminal"
            raise InputError("another command trains this run", run_dir.uri, hint)
        before = times
        time.sleep(EVERY)

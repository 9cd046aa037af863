"""Where a run is when a controller takes it up."""

from __future__ import annotations

import dataclasses
import time

from cluster.workers.clock import wall
from orchestrator.control.decide import State
from orchestrator.control.run_history import RunHistory
from orchestrator.job.spec import LimitSpec


def taken_up(record: RunHistory, limits: LimitSpec) -> State:
    """The state to go on from: at its end, if controllers have died too often with no new commit between.

    Ray starts a controller again for ever, and a job may be what ends it: one that fills the node's memory.
    """
    now, commit = time.monotonic(), record.newest.step if record.newest else 0
    failures = record.history.failures(limits.restart_window, wall(), now, commit)
    state = State(
        since=now,
        attempt=record.attempts,
        failures=failures,
        step=record.step,
        skips=record.history.skips,
    )
    if not record.history.died_last or len(failures) <= limits.restarts:
        return state
    text = f"{len(failures)} failures within {limits.restart_window:.0f} s without a new commit, the last: "
    text += failures[-1].why.removeprefix("resumed: ")
    text += "; give the controller's node more memory, or run fewer workers there"
    return dataclasses.replace(state, phase="stop", outcome="failed", stopping=text)

"""The runs of a rehearsal: driven on the Ray that this process has started, and looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from orchestrator.launch.run import RunOutcome, WatchedRun

LOOK = 0.1
"""Seconds between looks at a run."""


class Failed(Exception):
    """The stage did not do what it is to do."""

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(what)
        self.mend = mend


def attached(run: RunDir, spec: JobSpec, until: int | None, *faults: str, shared: str = "") -> WatchedRun:
    """The run in a directory, driven up to a step with these faults. `shared`: see `attach`."""
    from orchestrator.launch.run import attach

    return attach(spec, run, until, faults, None, shared=shared)


def follow(watched: WatchedRun, is_enough: Callable[[], bool]) -> RunOutcome | None:
    """Look at a run until it is enough, or until it has ended: then how."""
    while not is_enough():
        if (outcome := watched.look()) is not None:
            return outcome
        time.sleep(LOOK)
    return None


def ended(watched: WatchedRun, step: int) -> dict[str, Any]:
    """The summary of a run that has reached a step and ended. Raises Failed."""
    outcome = follow(watched, lambda: False)
    assert outcome is not None
    summary = outcome.summary or {}
    if outcome.outcome in (Outcome.DONE, Outcome.STOPPED) and summary.get("step") == step:
        return summary
    raise failure(outcome)


def failure(outcome: RunOutcome) -> Failed:
    """Why a run has ended too early: what its last fault means, what the rank printed last, and the hint."""
    summary = outcome.summary or {}
    if outcome.outcome == Outcome.STOPPED:
        what = f"the run ended after step {summary.get('step')}: {outcome.line}"
        return Failed(what, "give this machine less to do meanwhile")
    fault: dict[str, Any] = next(iter(reversed(summary.get("faults") or ())), {})
    meaning, _, hint = str(fault.get("explained") or "").partition("; ")
    last = "; printed last: " + str(fault["output"][-1]).strip() if fault.get("output") else ""
    return Failed(f"{outcome.line or meaning}{last}", hint)

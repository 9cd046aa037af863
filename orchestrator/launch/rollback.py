"""Take a run back to an earlier commit, on record. The same command then trains on from there.

The next start does what it does after any fault: it continues from the newest commit. So a rollback removes the later
ones, and what says that the run got further.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import is_shared, read_job
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.pins import holders, pinned_steps, without_dead_readers
from orchestrator.checkpoint.retention import rewind
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.controller.events import EventHistory
from orchestrator.data.samples.skips import is_before, merged
from orchestrator.observe.last_status import ControllerState, controller_state, last_status
from orchestrator.storage.row_line import EVENTS, METRICS, Row
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.run_directory import RunDir

TRIALS = "trials.jsonl"
"""The record of a search, in the folder above its trials' runs."""
NOT_AT_WORK = (ControllerState.ENDED, ControllerState.GONE)


@dataclass(frozen=True)
class RolledBack:
    """The result of a rollback: from which step to which, the steps of the removed checkpoints, and the number of
    lost steps."""

    run_dir: str
    before: int
    step: int
    removed: list[int]
    lost_steps: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @property
    def line(self) -> str:
        """Return it as a line for people."""
        steps = ", ".join(map(str, self.removed))
        which = f"commits of steps {steps} are" if len(self.removed) > 1 else f"commit of step {steps} is"
        removed = f", and the {which} removed" if self.removed else ""
        return f"{self.run_dir} is back at step {self.step}, from step {self.before}{removed}"


def roll_back(run: RunDir, step: int) -> RolledBack:
    """Take a run back to the commit of a step, and record that in its events.

    Args:
        run: the run directory.
        step: the step of the commit.

    Raises:
        InputError: the run is a trial of a search, a controller drives the run, the commit is missing, damaged or of
            no use to the job, the run is not further than that, or something holds a later commit. Nothing has changed
            in that case.
    """
    sweep = run.uri.rstrip("/").rpartition("/")[0]
    if sweep and RunDir(sweep).exists(TRIALS):
        problem = f"is a trial of the search in {sweep}, which would go on as if it had not gone back"
        hint = "begin a run from that step: train.continue_from: {run: RUN@STEP}"
        raise InputError(problem, run.uri, hint.replace("RUN@STEP", f"{run.uri}@{step}"))
    if run.read_json_or_empty("status.json") and controller_state(last_status(run)) not in NOT_AT_WORK:
        raise InputError("a controller drives this run", run.uri, "`orchestrator stop` ends it with a commit")
    _commit(run, step)  # before the lock, which writes a file
    with run.lock():
        commit, before, history = _commit(run, step)
        store = Store(run.commits)
        _refuse_pinned(run, store, step)
        return _go_back(run, store, commit, before, history)


def _commit(run: RunDir, step: int) -> tuple[CommitManifest, int, EventHistory]:
    """Return the commit of a step, the step that the run is at, and its events. Raises InputError if the run cannot
    continue from the commit, or is not further than that."""
    store, history = Store(run.commits), EventHistory(run.rows(EVENTS))
    where = f"{run.uri} step {step}"
    if step not in (steps := store.steps()):
        raise InputError("there is no such commit", where, f"steps: {steps}")
    if problems := store.verify(step):
        raise InputError(f"is damaged: {problems[0]}", where, "name another; `checkpoint verify` reads all")
    commit, spec = store.manifest(step), read_job(run)
    skips = merged(commit.meta.get("skips", ()))
    shared = spec is None or is_shared(commit, spec.train.steps)
    if not shared or not is_before(commit.position, skips, history.skips):
        problem = "the run cannot continue from it: it is of a learning rate or of samples that the run has left since"
        raise InputError(problem, where, "name another")
    before = max(steps[-1], (run.log(METRICS).last() or {}).get("step", 0))
    if before == step:
        raise InputError("the run is at this step already", where, "name an earlier one")
    return commit, before, history


def _refuse_pinned(run: RunDir, store: Store, step: int) -> None:
    later = [
        later_step
        for later_step in pinned_steps(without_dead_readers(store, store.retry(store.backend.list)))
        if later_step > step
    ]
    for later_step in sorted(later):
        by = " and ".join(holders(store, later_step)) or "somebody"
        hint = "let it end, or name that step; the reference of the run directory says how to remove a pin"
        raise InputError(f"the commit of step {later_step} is held by {by}", run.uri, hint)


def _go_back(
    run: RunDir, store: Store, commit: CommitManifest, before: int, history: EventHistory
) -> RolledBack:
    """Record the rollback first, so that no commit is missing without a word. It can be repeated if interrupted."""
    step, status = commit.step, run.read_json_or_empty("status.json")
    later = list(itertools.takewhile(lambda row: row["step"] > step, run.log(METRICS).newest()))
    removed = [later_step for later_step in store.steps() if later_step > step]
    result = RolledBack(run.uri, before, step, removed, len(later))
    reason = f"rolled back from step {before} to the commit at step {step} by the user"
    fields: EventFields = {
        "lost_steps": len(later),
        "seconds_lost": sum(row["step_seconds"] for row in later),
        "rolled_back": {"before": before, "removed": removed, "at": time.time()},
    }
    if status.get("phase") not in (Outcome.DONE, Outcome.STOPPED, Outcome.FAILED):
        # If the controller was killed, the time since then does not belong to the run.
        times = [status.get("time") or 0.0, *(event["time"] for event in history.events[-1:])]
        fields["time"] = float(max(times))
    attempt = history.attempts
    event = history.record(attempt, step, Outcome.STOPPED, reason, fields)
    run.append(EVENTS, [event])
    store.fence(max(store.fenced(), attempt + 1))  # a rank that is left somewhere commits nothing more
    rewind(store, step)
    run.log(METRICS).cut(step)
    run.write_json("status.json", _status(status, commit, reason, event))
    if run.exists("summary.json"):
        run.remove("summary.json")
    return result


def _status(status: Row, commit: CommitManifest, reason: str, event: Row) -> Row:
    """Return the status of the run from now on."""
    copied = {key: status.get(key) for key in ("name", "objective", "steps", "layout")}
    return {
        **copied,
        "phase": str(Outcome.STOPPED),
        "step": commit.step,
        "attempt": event["attempt"],
        "loss": commit.meta.get("loss"),
        "eta_seconds": None,
        "note": f"{reason}; the same command continues from there",
        "events": event["number"],
        "ranks": [],
        "time": time.time(),
    }

"""The history of a run within Ray Train, which its rank 0 writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Unpack

import ray
import ray.train

from cluster.workers.clock import wall
from cluster.workers.error_kind import cause_of
from cluster.workers.gang import RankStatus
from cluster.workers.rank_process import describe
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.config.spec import parse
from orchestrator.controller.decide import decide
from orchestrator.controller.events import fault_event
from orchestrator.controller.health import GRACE
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import Observation, State, policy_of
from orchestrator.launch.ray_train_attempt import begin_attempt
from orchestrator.models.pinned_base import release_base, release_teacher
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.run_directory import Row, RunDir


class RankZeroHistory:
    """Writes the history of the run at rank 0, as the controller of `orchestrator run` does."""

    def __init__(self, config: dict[str, Any], run: RunDir) -> None:
        self._config = config
        self._spec = parse(config["job"])
        self._run = run
        self._history = RunHistory(self._spec, run)
        self._attempt = 0

    @property
    def saved(self) -> int:
        """How many rows of this attempt are stored."""
        return self._history.files.saved

    def begin(self, world: int) -> dict[str, Any]:
        """Roll back to the last sound commit, choose a layout, and return the fields of a `Task` for both."""
        self._attempt = self._history.attempts + 1
        return begin_attempt(self._config, self._run, self._history, world)

    def take(self, row: Row) -> None:
        """Add the row of a step to metrics.jsonl."""
        first = not self._history.files.saved
        self._history.take([row])
        if first:
            began = self._history.training_began(self._attempt)
            self._event("train", f"the first step of attempt {self._attempt} is done", time=began)

    @property
    def last_row(self) -> Row:
        """The row of the last step."""
        return self._history.files.recent[-1]

    def last_commit(self) -> dict[str, Any]:
        """Return the location of the last checkpoint. Ray Train gets this instead of a checkpoint, which it would
        copy."""
        commit, _ = self._history.last_commit()
        assert commit is not None
        return {"step": commit.step, "uri": f"{self._history.commits.store.uri}/{commit_folder(commit.step)}"}

    def end(self) -> None:
        """Record that all steps are done."""
        self._event("done", f"{self._history.step} steps are done")
        release_base(self._spec.needs_base, self._run, self._history.base)
        release_teacher(self._run, self._history.teacher)

    def fail(self, error: Exception) -> None:
        """Record the error that ended the attempt and what `decide` makes of it."""
        history = self._history
        now = time.monotonic()
        past = history.event_history
        failures = past.failures(self._spec.limits.restart_window, wall(), now)
        before = State(
            phase="train",
            step=history.step,
            moved=now,
            suspected=now - GRACE,  # Ray Train has already waited for a death that explains the error
            failures=failures,
            skips=past.skips,
        )
        node = ray.util.get_node_ip_address()
        failed = RankStatus(
            rank=0,
            node=node,
            pid=0,
            state="failed",
            step=history.step,
            error=describe(error),
            failed_at=now,
            last_heartbeat=now,
            cause=cause_of(error),
        )
        policy = policy_of(self._spec, lambda workers: None)
        after, action = decide(policy, before, Observation(now=now, ranks=(failed,)))
        commit, _ = history.last_commit()
        lost = history.files.after(commit.step if commit else 0)
        assert action.fault is not None
        reason, fields = fault_event(before, after, action.fault, lost, ())
        self._event("stop", reason, **fields)

    def close(self) -> None:
        """Write nothing more."""
        self._history.close()

    def _event(self, phase: str, reason: str, **more: Unpack[EventFields]) -> None:
        self._history.event(self._attempt, self._history.step, phase, reason, **more)


@contextlib.contextmanager
def history_of(config: dict[str, Any], run: RunDir) -> Iterator[RankZeroHistory]:
    """Open the history of a run, locked against other commands, and record how the block ends."""
    with run.lock():
        history = RankZeroHistory(config, run)
        try:
            yield history
            history.end()
        except Exception as error:
            history.fail(error)
            raise
        finally:
            history.close()

"""Write the events and status.json of a run while its controller drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

from cluster.workers.gang import RankStatus
from cluster.workers.rank_process import describe
from orchestrator.config.errors import InputError
from orchestrator.controller.rollout_changes import RolloutChanges
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import Phase, State
from orchestrator.controller.status import status_of
from orchestrator.controller.workers import POLL
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.row_types import EventFields

STATUS_EVERY = 1.0
"""Seconds between two writes of status.json."""


class StatusWriter:
    """Writes the events and status.json of one run. Other threads may call `status`.

    Attributes:
        history: the record of the run, None before it is open.
        note: the controller's present activity, as text for people.
        rollout_changes: what events tell of rollout workers; None without any.
        processes: the controller's process and its ancestors.
    """

    def __init__(
        self, name: str, objective: str, steps: int, until: int, evaluate: EvaluateSpec | None
    ) -> None:
        """Write nothing yet.

        Args:
            name: the name of the job.
            objective: the job's objective.
            steps: steps of the run.
            until: the last step to train to.
            evaluate: what the job evaluates.
        """
        self._name = name
        self._objective = objective
        self._steps = steps
        self._until = until
        self._evaluate = evaluate
        self.history: RunHistory | None = None
        self.note = ""
        self.rollout_changes: RolloutChanges | None = None
        # Read once: when the command dies, its processes are adopted by another one before they end.
        self.processes = lineage()
        self._status_written = 0.0
        """The monotonic time at which status.json was last written."""

    def status(
        self,
        state: State,
        ranks: tuple[RankStatus, ...],
        evaluation: str,
        rollout_workers: Sequence[RankStatus],
    ) -> dict[str, Any]:
        """Return the content of status.json, see `status_of`."""
        return status_of(
            name=self._name,
            objective=self._objective,
            steps=self._steps,
            evaluate=self._evaluate,
            state=state,
            history=self.history,
            ranks=ranks,
            until=self._until,
            note=self.note,
            evaluation=evaluation,
            rollout_workers=rollout_workers,
            processes=self.processes,
        )

    @property
    def is_status_due(self) -> bool:
        """Whether status.json was last written STATUS_EVERY seconds ago or earlier."""
        return time.monotonic() - self._status_written > STATUS_EVERY

    def write_status(self, status: dict[str, Any]) -> None:
        """Write status.json."""
        assert self.history is not None
        self._status_written = time.monotonic()
        self.history.files.write_document("status.json", status)

    def note_error(self, error: Exception) -> None:
        """Show the error that ends the run."""
        self.note = str(error) if isinstance(error, InputError) else describe(error)

    def event(
        self, state: State, phase: str, reason: str, step: int | None = None, **more: Unpack[EventFields]
    ) -> None:
        """Add an event of the present attempt, at the present step unless `step` is given."""
        assert self.history is not None
        if self.rollout_changes is not None and (
            changes := self.rollout_changes.take(is_start=phase == "start")
        ):
            more["rollout_workers"] = changes
        self.history.event(state.attempt, state.step if step is None else step, phase, reason, **more)

    def wait(self, state: State, phase: Phase, reason: str, **more: Unpack[EventFields]) -> None:
        """Wait until the next pass of the controller. The first pass of a phase adds an event instead."""
        assert self.history is not None
        self.note = reason
        if self.history.events[-1]["phase"] == phase:
            time.sleep(POLL)
        else:
            self.event(state, phase, reason, **more)

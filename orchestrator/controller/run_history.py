"""The record of one run: its rows, events, documents and commits, and how a controller resumes from it.

`RunHistory` is the entry point. Its parts are the commits (`RunCommits`), the files (`RunFiles`) and the copies on
servers (`RunCopies`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Unpack

from cluster.workers.clock import wall
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.redact import holds_secret, redact_message
from orchestrator.config.spec import JobSpec, dump
from orchestrator.controller.background_trace import BackgroundTrace
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.controller.events import EventHistory, Spending, memory_seen
from orchestrator.controller.row_recovery import find, recovered
from orchestrator.controller.run_commits import RunCommits
from orchestrator.controller.run_copies import RunCopies
from orchestrator.controller.run_files import RunFiles
from orchestrator.controller.save_failures import SaveFailures
from orchestrator.controller.state import Phase, State
from orchestrator.observe.notifier import TELLING, Notifier
from orchestrator.observe.totals import RunTotals, is_number, longest_step, median_step, totals_of
from orchestrator.storage.row_line import EVENTS, Row
from orchestrator.storage.row_log import steps_text
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.run_directory import ORIGIN, RunDir


class RunHistory:
    """The record of one run in its directory, across all its controllers.

    Methods that go back to a commit wait for storage; all others leave it to a background thread, see `RunFiles`.
    Creating the object adds the event "begun" or "resumed".

    Attributes:
        commits: the commits that the run can start from.
        files: the rows and documents, and those of the last steps in memory.
        copies: the run in MLflow and other sinks.
        event_history: all events, with the facts that are derived from them.
        saves: the outcomes of saves.
        spending: the hours and USD that the job has used.
        trace: the memory prediction for the layout that trains, which it writes to plan.json.
        predicted_memory: predicted bytes of a rank under the present layout, None before the first plan.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: RunDir,
        died: bool = False,
        log: ControllerLog | None = None,
        launched: float = 0.0,
    ) -> None:
        """Open the record of a run, new or old.

        Args:
            spec: the job.
            run: the run directory.
            died: whether this controller replaces one that died.
            log: the controller's log, which shows each event.
            launched: unix time of the command that started the run, 0 if unknown.

        Raises:
            InputError: the directory belongs to another run. Nothing has been written in that case.
        """
        # Raises if the precision is not chosen yet. The document written below makes it permanent.
        _ = spec.train.dtype
        self._spec = spec
        self._run = run
        self._log = log or ControllerLog(run.uri)
        self.commits = RunCommits(spec.run_identity, spec.train.steps, run)
        self.copies = RunCopies(spec.tracked, spec.sinks, run)
        self.files = RunFiles(run, self.commits.store, spec.evaluates_beside, self.copies)
        self._notifier = Notifier(spec.notify, spec.name, run.uri)
        self.event_history = EventHistory(run.rows(EVENTS), self._notifier)
        self.saves = SaveFailures(spec.limits.unsaved)
        self.spending = Spending(spec.limits, self.event_history)
        self.trace = BackgroundTrace(dump(spec), write=self.planned)
        self.predicted_memory: float | None = None
        self._is_new = not (self.events or self.files.recent or self.commits.newest or run.exists("job.yaml"))
        """Whether this object began the run, and the run is not yet known to be able to start."""
        self._rows_checked = False
        """Whether lost rows have been looked for."""

        status = run.read_json_or_empty("status.json")
        stored = status.get("events")  # the number of the newest event, which may be lost
        number = max(self.event_history.number, stored if isinstance(stored, int) else 0)
        self.event_history.number = number
        self.files.events_stored = number
        self.files.metrics.mark = status.get("rows")

        text = dump(spec)
        run.write_text("job.yaml", text, private=holds_secret(text))
        self._add_first_event(status, died, launched)

    def _add_first_event(self, status: dict[str, Any], died: bool, launched: float) -> None:
        """Add the event with which a controller takes up the run; `status` is the last status.json."""
        fields: EventFields = {
            "last_seen": status["time"] if is_number(status.get("time")) else None,
            "launched": 0.0 if died else launched,
        }
        extension = self.commits.extension
        newest = self.commits.newest
        reason = "resumed" if self.events or self.files.recent else "begun"
        if died:
            reason = f"resumed: the controller's process has ended, {memory_seen(status)}"
            fields["controller_died"] = newest.step if newest else 0
        if extension is not None and self.event_history.length != extension.after:
            reason = f"{reason}: {extension}"
            fields["extended"] = dataclasses.asdict(extension)
            fields["lost_steps"] = max(self.step - extension.step, 0)
        self.event(self.attempts, self.step, "prepare", reason, **fields)
        # Stored at once, because an event identifies the run, and its extension, to MLflow.
        self.files.write_events()

    @property
    def events(self) -> list[Row]:
        """All events, the newest last."""
        return self.event_history.events

    @property
    def attempts(self) -> int:
        """The number of attempts so far.

        It is the largest number that events, rows, commits and the fence of the store show: events may be lost, and an
        attempt that fenced the store may have ended before its first event.
        """
        recent = self.files.recent
        newest_row = recent[-1]["attempt"] if recent else 0
        commits = self.commits
        return max(self.event_history.attempts, newest_row, commits.attempt, commits.fenced_attempt)

    def state(self, phase: Phase) -> State:
        """Return the state of the run in which a controller resumes it, in the given phase."""
        now, history = time.monotonic(), self.event_history
        commit = self.commits.newest.step if self.commits.newest else 0
        return State(
            phase=phase,
            since=now,
            attempt=self.attempts,
            step=self.step,
            failures=history.failures(self._spec.limits.restart_window, wall(), now, commit),
            doubtful_after=history.doubtful_after,
            wrong_nodes=history.wrong_nodes,
            skips=history.skips,
        )

    @property
    def data(self) -> str:
        """The URI of the run's prepared data, empty before it has any."""
        return next((event["data"] for event in self.events if event.get("data")), self.commits.data)

    @property
    def base(self) -> dict[str, Any]:
        """The pretrained weights that the run began with; empty without any, or before the run begins."""
        return self.commits.base or self.event_history.base

    @property
    def teacher(self) -> dict[str, Any]:
        """The weights of the teacher that the run learns from; empty without one, or before the run begins."""
        committed = self.commits.teacher
        noted = self.event_history.teacher
        # A commit of an earlier version has no step.
        return noted if committed.get("digest") in (None, noted.get("digest")) else committed

    @property
    def step(self) -> int:
        """The last step that has a row, 0 before the first."""
        recent = self.files.recent
        return recent[-1]["step"] if recent else 0

    @property
    def step_seconds(self) -> float:
        """The median of the latest steps, 0 without any."""
        return median_step(self.files.recent)

    @property
    def longest_step(self) -> float:
        """Seconds of the longest of the present attempt's latest steps, 0 without any."""
        return longest_step(self.files.recent)

    def event(self, attempt: int, step: int, phase: str, reason: str, **more: Unpack[EventFields]) -> None:
        """Add a row to events.jsonl. Secrets in error messages are removed first.

        Args:
            attempt: the attempt that the event belongs to.
            step: the step that the event belongs to.
            phase: the phase that starts or continues.
            reason: a line for people.
            more: further fields of the row.
        """
        reason = redact_message(reason)
        fault = redact_message(more.get("first_fault") or "")
        more["first_fault"] = fault or None
        self._log.event(step, phase, f"{reason}: {fault}" if fault else reason)
        if "tasks" in more:
            more["tasks"] = {**more["tasks"], "attempt": attempt}
        self.files.add_event(self.event_history.record(attempt, step, phase, reason, more))

    def planned(self, plan: dict[str, Any]) -> None:
        """Write plan.json for the layout that starts or trains."""
        self.predicted_memory = plan["predicted"]["memory_bytes"]
        self.files.write_document("plan.json", plan)
        self.copies.tracker.document("plan.json")

    def withdraw(self) -> bool:
        """Remove the files of a run that this object began and that cannot start, because its job is wrong.

        Returns whether they were removed. Does nothing after `track`, or for a run that existed before.
        """
        if not self._is_new:
            return False
        self.close()
        self.files.remove()
        return True

    def track(self) -> None:
        """Start to copy the run to MLflow and the job's sinks. Call it once the run is known to be able to start."""
        self._is_new = False
        self._log.keep()
        self.copies.begin()

    def training_began(self, attempt: int) -> float:
        """Return the unix time at which the attempt began its first step, or the evaluation before that step.

        Without a row of the attempt the present time is returned; the result is never before the newest event.
        """
        first = next((row for row in self.files.recent if row["attempt"] == attempt), None)
        if first is None:
            began = wall()
        else:
            began = first["time"] - (first["step_seconds"] + first.get("evaluation_seconds", 0.0))
        return max(began, self.events[-1]["time"])

    def take(self, rows: Sequence[Row]) -> None:
        """Add the rows that a gang reported to metrics.jsonl. Call it often, because it also starts due writes."""
        # First, so that no row is lost if a trace cannot start, as on a full disk.
        self.files.add_steps(rows)
        self.trace.look(bool(rows))

    def spent(self) -> tuple[float, float]:
        """Return the hours and USD that the job has used, at most some seconds old."""
        return self.spending.count(self.files.recent, wall())

    def close(self) -> None:
        """Wait for the write in progress, and write nothing more."""
        self.trace.stop()
        self.files.close()
        self._notifier.close(TELLING)
        self.copies.close()
        self._log.close()

    def last_commit(
        self, bad: frozenset[int] = frozenset(), doubtful_after: int | None = None
    ) -> tuple[CommitManifest | None, list[str]]:
        """Return the newest commit that the run can start from, and a line for each that is passed over or doubted.

        Passed over are damaged commits, commits that used samples which must be left out, and commits of the learning
        rate's decay before an extension of the run.

        Args:
            bad: steps of commits that a rank reported as damaged. Each is verified first.
            doubtful_after: the step after which commits may be wrong, see `State`.
        """
        result, notes = self.commits.last(bad, doubtful_after, self.event_history.skips)
        return result.commit, notes

    def roll_back(
        self, bad: frozenset[int], attempt: int, doubtful_after: int | None = None
    ) -> tuple[CommitManifest | None, list[str]]:
        """Return to the last sound commit, and remove every row and commit after it.

        From now on only `attempt` may commit: processes that are left of earlier attempts are fenced off.

        Args:
            bad: steps of commits that a rank reported as damaged.
            attempt: the attempt that starts from the commit.
            doubtful_after: the step after which commits may be wrong, see `State`.

        Returns:
            As `last_commit`.

        Raises:
            InputError: the run had commits, and none of them can be used (see `refuse_lost`).
        """
        last, notes = self.commits.fence(bad, attempt, doubtful_after, self.event_history.skips)
        commit = last.commit
        step = commit.step if commit else 0
        self.files.evaluations.withdraw(step)
        self.commits.remove_later(last, attempt)

        # A run that began with another run's commit carries rows of earlier steps, which belong to that run.
        first = int((self._run.read_json(ORIGIN) or {}).get("step", 0)) + 1
        carried = [row for row in commit.meta["rows"] if row["step"] >= first] if commit else []
        metrics = self.files.metrics
        missing = [] if self._rows_checked else metrics.missing(metrics.mark, first, step)
        metrics.cut(step, carried)
        if not metrics.problem:
            self._rows_checked = True
            self.restore(metrics.missing(None, first, step) if missing else (), attempt, step)
            if lost := self.event_history.untold():
                reason = f"events {steps_text(lost)} were lost from {EVENTS}: no total includes them"
                self.event(attempt, step, "wait", reason, missing_events=lost)
        self.files.resume_from(step, commit)
        self.copies.tracker.rows(carried)
        return commit, notes

    def restore(self, missing: Sequence[tuple[int, int]], attempt: int, step: int) -> bool:
        """Recover rows that storage has lost, and report those that are gone for good.

        Args:
            missing: the gaps in metrics.jsonl.
            attempt: the attempt of the event that reports them.
            step: the step of that event.

        Returns:
            Whether any row was recovered.
        """
        if not missing or [list(gap) for gap in missing] == self.event_history.missing:
            return False
        rows = find(
            self._spec.name,
            self._spec.tracking,
            self._run,
            log=self.files.metrics.log,
            store=self.commits.store,
            events=self.events,
            missing=missing,
        )
        if rows:
            self.files.metrics.restore(list(rows.values()))
        remaining, reason = recovered(missing, rows)
        self.event(attempt, step, "wait", reason, missing_rows=remaining)
        return bool(rows)

    def counted(self, attempt: int, step: int) -> RunTotals:
        """Return the totals of all rows of the run, after recovering lost rows.

        Args:
            attempt: the attempt of an event that reports lost rows.
            step: the step of that event.

        Raises:
            OSError: storage does not take the waiting rows.
        """
        self.files.wait_until_stored()
        totals = totals_of(self._run)
        return totals_of(self._run) if self.restore(totals.missing, attempt, step) else totals

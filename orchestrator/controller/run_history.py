"""The record of one run: its rows, events, documents and commits, and how a controller resumes from it.

`RunHistory` is the entry point. It writes to the run directory from a background thread, so the controller's loop never
blocks on storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, Unpack

from cluster.workers.clock import wall
from orchestrator.checkpoint import identity
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.last_commit import LastCommit, last_commit, refuse_lost
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.peer_memory import PeerMemory, rewind_all, rewind_memory
from orchestrator.checkpoint.reverify import Doubted
from orchestrator.config.redact import holds_secret, redact_message
from orchestrator.config.spec import JobSpec, dump
from orchestrator.controller.background_trace import TraceBeside
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.controller.evaluation_rows import EvaluationRows
from orchestrator.controller.events import EventHistory, Spending, memory_seen
from orchestrator.controller.node_rows import NodeRows
from orchestrator.controller.row_recovery import find, recovered
from orchestrator.controller.save_failures import SaveFailures
from orchestrator.controller.state import Phase, State
from orchestrator.data.samples.skips import is_before, merged
from orchestrator.observe.mlflow_dead_runs import settle_others
from orchestrator.observe.mlflow_delivery import Tracker
from orchestrator.observe.notifier import TELLING, Notifier
from orchestrator.observe.sinks.sink_process import SinkProcess
from orchestrator.observe.totals import RunTotals, is_number, longest_step, median_step, totals_of
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.document_writer import DocumentWriter
from orchestrator.storage.row_line import EVENTS, METRICS, Row, evaluations_in
from orchestrator.storage.row_log import steps_text
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.row_writer import HOLD, RowWriter
from orchestrator.storage.run_directory import ORIGIN, RunDir

RECENT = 200
"""Rows kept in memory, because a run may have millions."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for storage to take its last rows."""
LONGEST_WRITE = 180.0
"""Seconds after which a write of rows and documents has ended, whatever storage does, since each call is bounded."""


class RunHistory:
    """The record of one run in its directory, across all its controllers.

    A background thread writes rows, events and documents, so callers never block on storage. Methods that go back to a
    commit do wait for it. Creating the object adds the event "begun" or "resumed".

    Attributes:
        store: the commits on storage.
        newest: the newest commit when this controller started, None if the run had none.
        recent: the last RECENT rows of metrics.jsonl.
        saved: how many rows have been stored since the run last returned to a commit.
        events_stored: the number of the newest event that is stored.
        event_history: all events, with the facts that are derived from them.
        evaluations: the rows of evals.jsonl.
        nodes: the rows of nodes.jsonl.
        saves: the outcomes of saves.
        spending: the hours and USD that the job has used.
        trace: the memory prediction for the layout that trains, which it writes to plan.json.
        predicted_memory: predicted bytes of a rank under the present layout, None before the first plan.
        tracker: the copy of the run in MLflow. It does nothing before `track`.
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
        self.newest, extension = identity.take_up(spec.run_identity, run)
        self.store = Store(run.commits)
        self._doubted = Doubted(self.store)
        self._peers: PeerMemory | None = None
        """Commits in the memory of other nodes (snapshot servers); None without any."""
        self._peer_token = ""
        self._peer_servers: tuple[Mapping[str, str], ...] = ()

        self._metrics = RowWriter(run, METRICS, hold=0.0 if run.local else HOLD, stored=self._on_steps_stored)
        self._events = RowWriter(run, EVENTS, stored=self._on_events_stored)
        self.evaluations = EvaluationRows(
            spec.evaluates_beside, run, self.store, stored=self._on_evaluations_stored
        )
        self.nodes = NodeRows(run, stored=self._on_readings_stored)
        # Rows are written before the events that mention them.
        self._row_writers = (self._metrics, self.evaluations.rows, self.nodes.rows, self._events)
        self._documents = DocumentWriter(run)
        self._writer = BackgroundWriter(self._write)

        self._notifier = Notifier(spec.notify, spec.name, run.uri)
        self.event_history = EventHistory(run.rows(EVENTS), self._notifier)
        self.saves = SaveFailures(spec.limits.unsaved)
        self.spending = Spending(spec.limits, self.event_history)
        self.trace = TraceBeside(dump(spec), write=self.planned)
        self.predicted_memory: float | None = None
        # Replaced and never modified, because `status` reads it from another thread.
        self.recent: tuple[Row, ...] = tuple(self._metrics.latest(RECENT))
        self.saved = 0

        # Commits repeat some facts of the events, in case events were lost.
        self._committed_attempt = 0
        self._committed_data = ""
        if self.newest is not None:
            self._committed_attempt = self.newest.meta.get("attempt", 0)
            self._committed_data = self.newest.meta.get("data", "")
        self._fenced_attempt = self.store.fenced()
        """The last attempt that was allowed to commit, see `Store.fence`."""
        self._shards = ""
        """The digest of the run's token shards, empty until `same_shards`."""
        self._is_new = not (self.events or self.recent or self.newest or run.exists("job.yaml"))
        """Whether this object began the run, and the run is not yet known to be able to start."""
        self._rows_checked = False
        """Whether lost rows have been looked for."""

        status = run.read_json_or_empty("status.json")
        stored = status.get("events")  # the number of the newest event, which may be lost
        number = max(self.event_history.number, stored if isinstance(stored, int) else 0)
        self.event_history.number = number
        self.events_stored = number
        self._metrics.mark = status.get("rows")

        text = dump(spec)
        run.write_text("job.yaml", text, private=holds_secret(text))
        untracked = spec.model_copy(update={"tracking": None, "sinks": None})
        self.tracker = Tracker(untracked.tracked, run)
        self._sinks = SinkProcess(untracked.sinks, run)
        self._add_first_event(status, extension, died, launched)

    def _add_first_event(
        self, status: dict[str, Any], extension: identity.Extension | None, died: bool, launched: float
    ) -> None:
        """Add the event with which a controller takes up the run; `status` is the last status.json."""
        fields: EventFields = {
            "last_seen": status["time"] if is_number(status.get("time")) else None,
            "launched": 0.0 if died else launched,
        }
        reason = "resumed" if self.events or self.recent else "begun"
        if died:
            reason = f"resumed: the controller's process has ended, {memory_seen(status)}"
            fields["controller_died"] = self.newest.step if self.newest else 0
        if extension is not None and self.event_history.length != extension.after:
            reason = f"{reason}: {extension}"
            fields["extended"] = dataclasses.asdict(extension)
            fields["lost_steps"] = max(self.step - extension.step, 0)
        self.event(self.attempts, self.step, "prepare", reason, **fields)
        # Stored at once, because an event identifies the run, and its extension, to MLflow.
        self._events.flush(now=True)

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
        newest_row = self.recent[-1]["attempt"] if self.recent else 0
        return max(self.event_history.attempts, newest_row, self._committed_attempt, self._fenced_attempt)

    def state(self, phase: Phase) -> State:
        """Return the state of the run in which a controller resumes it, in the given phase."""
        now, history = time.monotonic(), self.event_history
        commit = self.newest.step if self.newest else 0
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
        return next((event["data"] for event in self.events if event.get("data")), self._committed_data)

    @property
    def base(self) -> dict[str, Any]:
        """The pretrained weights that the run began with; empty without any, or before the run begins."""
        return (self.newest.meta.get(identity.BASE) if self.newest else None) or self.event_history.base

    @property
    def teacher(self) -> dict[str, Any]:
        """The weights of the teacher that the run learns from; empty without one, or before the run begins."""
        committed = identity.teacher_of(self.newest.meta) if self.newest else {}
        noted = self.event_history.teacher
        # A commit of an earlier version has no step.
        return noted if committed.get("digest") in (None, noted.get("digest")) else committed

    @property
    def mark(self) -> dict[str, int] | None:
        """Where the stored rows end, for `RowWriter.missing`."""
        return self._metrics.mark

    @property
    def step(self) -> int:
        """The last step that has a row, 0 before the first."""
        recent = self.recent
        return recent[-1]["step"] if recent else 0

    @property
    def step_seconds(self) -> float:
        """The median of the latest steps, 0 without any."""
        return median_step(self.recent)

    @property
    def longest_step(self) -> float:
        """Seconds of the longest of the present attempt's latest steps, 0 without any."""
        return longest_step(self.recent)

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
        self._metrics.hurry()
        if "tasks" in more:
            more["tasks"] = {**more["tasks"], "attempt": attempt}
        self._events.add([self.event_history.record(attempt, step, phase, reason, more)])
        self._events.hurry()
        self._writer.request()

    def planned(self, plan: dict[str, Any]) -> None:
        """Write plan.json for the layout that starts or trains."""
        self.predicted_memory = plan["predicted"]["memory_bytes"]
        self.document("plan.json", plan)
        self.tracker.document("plan.json")

    def document(self, name: str, value: Any) -> None:
        """Replace a JSON document. After storage refuses one, the next try waits for a while."""
        self._documents.add(name, value)
        if self._documents.due:
            self._writer.request()

    def _write(self) -> None:
        """Write the rows that are due, and the latest version of each document. Runs in the background thread."""
        for writer in self._row_writers:
            writer.flush()
        self._documents.flush()

    def _on_steps_stored(self, rows: Sequence[Row]) -> None:
        self.saved += len(rows)
        self.evaluations.rows.add(evaluations_in(rows))
        self.tracker.rows(rows)

    def _on_events_stored(self, events: Sequence[Row]) -> None:
        self.events_stored = events[-1]["number"]

    def _on_evaluations_stored(self) -> None:
        self.tracker.evaluated()

    def _on_readings_stored(self, readings: Sequence[Row]) -> None:
        self.tracker.nodes()

    def withdraw(self) -> bool:
        """Remove the files of a run that this object began and that cannot start, because its job is wrong.

        Returns whether they were removed. Does nothing after `track`, or for a run that existed before.
        """
        if not self._is_new:
            return False
        self.close()  # so that nothing is written after the removal
        for name in ("status.json", EVENTS, "job.yaml"):
            with contextlib.suppress(OSError):
                self._run.remove(name)
        return True

    def same_shards(self, digest: str, data: str) -> str:
        """Return `digest`, of the token shards at `data`. Raises InputError if the run began with other shards."""
        identity.check_shards(self.newest, digest, data)
        if self._shards not in ("", digest):
            raise identity.wrong_shards(data)
        self._shards = digest
        return digest

    def track(self) -> None:
        """Start to copy the run to MLflow and the job's sinks. Call it once the run is known to be able to start."""
        self._is_new = False
        self._log.keep()
        self._sinks = SinkProcess(self._spec.sinks, self._run)
        self.tracker = Tracker(self._spec.tracked, self._run, begins=settle_others)

    def training_began(self, attempt: int) -> float:
        """Return the unix time at which the attempt began its first step, or the evaluation before that step.

        Without a row of the attempt the present time is returned; the result is never before the newest event.
        """
        first = next((row for row in self.recent if row["attempt"] == attempt), None)
        if first is None:
            began = wall()
        else:
            began = first["time"] - (first["step_seconds"] + first.get("evaluation_seconds", 0.0))
        return max(began, self.events[-1]["time"])

    def take(self, rows: Sequence[Row]) -> None:
        """Add the rows that a gang reported to metrics.jsonl. Call it often, because it also starts due writes."""
        self._metrics.add(rows)
        if rows:
            self.recent = (*self.recent, *rows)[-RECENT:]
        self.trace.look(bool(rows))
        if any(writer.due for writer in self._row_writers):
            self._writer.request()

    def evaluated(self, row: Row) -> None:
        """Add the row of an evaluation that ran beside the run."""
        self.evaluations.rows.add([row])
        self._writer.request()

    def close(self) -> None:
        """Wait for the write in progress, and write nothing more."""
        self.trace.stop()
        self._writer.close(LONGEST_WRITE)
        self._notifier.close(TELLING)
        self._sinks.close()
        self._log.close()

    def settle(self) -> None:
        """Wait until everything is stored. Raises OSError with a plain message if storage refuses it."""
        self._writer.wait(LONGEST_WRITE)
        for writer in (self._metrics, self.evaluations.rows, self._events):
            writer.drain(PATIENCE)
        self.nodes.settle()

    def use_holders(self, token: str, holders: Sequence[Mapping[str, str]]) -> None:
        """Look for commits in the memory of these snapshot servers first.

        Args:
            token: authenticates this run to the servers.
            holders: {"node", "address"} of each server.
        """
        self._peer_token = token
        self._peer_servers = tuple(holders)
        self.leave_out(frozenset())

    def leave_out(self, lost: Set[str]) -> None:
        """Do not wait for the snapshot servers on the `lost` nodes, which do not answer."""
        addresses = [server["address"] for server in self._peer_servers if server["node"] not in lost]
        if self._peers is not None:
            self._peers.close()
        self._peers = PeerMemory(self._peer_token, addresses) if addresses else None

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
        result, notes = self._last_commit(bad, doubtful_after)
        return result.commit, notes

    def _last_commit(self, bad: frozenset[int], doubtful_after: int | None) -> tuple[LastCommit, list[str]]:
        damaged, notes = self._doubted.damaged(bad)

        def is_usable(commit: CommitManifest) -> bool:
            is_in_doubt = doubtful_after is not None and commit.step > doubtful_after
            return not is_in_doubt and self._is_usable(commit)

        result = last_commit(self._peers, self.store, damaged, is_usable)
        return result, notes + [note for note in result.notes if note not in notes]

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
        self._run.require_lock()
        self._fenced_attempt = max(self._fenced_attempt, attempt)
        self.store.fence(attempt)
        if bad:  # the copy in memory may be the damaged one
            rewind_memory(self._peers, min(bad) - 1, attempt)
        if doubtful_after is not None:
            rewind_memory(self._peers, doubtful_after, attempt)
        result, notes = self._last_commit(bad, doubtful_after)
        commit = result.commit
        if commit is None and not result.left_out:
            refuse_lost(self._run, result.unsound)
        step = commit.step if commit else 0
        self.evaluations.withdraw(step)
        rewind_all(
            self._peers, self.store, step if commit else -1, attempt, commit if result.in_memory else None
        )

        # A run that began with another run's commit carries rows of earlier steps, which belong to that run.
        first = int((self._run.read_json(ORIGIN) or {}).get("step", 0)) + 1
        carried = [row for row in commit.meta["rows"] if row["step"] >= first] if commit else []
        missing = [] if self._rows_checked else self._metrics.missing(self._metrics.mark, first, step)
        self._metrics.cut(step, carried)
        if not self._metrics.problem:
            self._rows_checked = True
            self.restore(self._metrics.missing(None, first, step) if missing else (), attempt, step)
            if lost := self.event_history.untold():
                reason = f"events {steps_text(lost)} were lost from {EVENTS}: no total includes them"
                self.event(attempt, step, "wait", reason, missing_events=lost)
        self.recent = tuple(self._metrics.latest(RECENT))
        self.evaluations.cut(step, commit, evaluations_in(self.recent))
        self.saved = 0
        self.tracker.rows(carried)
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
            log=self._metrics.log,
            store=self.store,
            events=self.events,
            missing=missing,
        )
        if rows:
            self._metrics.restore(list(rows.values()))
        left, reason = recovered(missing, rows)
        self.event(attempt, step, "wait", reason, missing_rows=left)
        return bool(rows)

    def counted(self, attempt: int, step: int) -> RunTotals:
        """Return the totals of all rows of the run, after recovering lost rows.

        Args:
            attempt: the attempt of an event that reports lost rows.
            step: the step of that event.

        Raises:
            OSError: storage does not take the waiting rows.
        """
        self.settle()
        totals = totals_of(self._run)
        return totals_of(self._run) if self.restore(totals.missing, attempt, step) else totals

    def beyond(self, step: int) -> list[Row]:
        """Return the rows of the steps after `step`."""
        recent = self.recent
        if recent and recent[0]["step"] <= step:
            return [row for row in recent if row["step"] > step]
        return list(itertools.takewhile(lambda row: row["step"] > step, self._metrics.newest()))[::-1]

    def _is_usable(self, commit: CommitManifest) -> bool:
        """Whether the run may start from the commit: it belongs to the same job and leaves out the same samples."""
        its_skips = merged(commit.meta.get("skips", ()))
        return identity.is_shared(commit, self._spec.train.steps) and is_before(
            commit.position, its_skips, self.event_history.skips
        )

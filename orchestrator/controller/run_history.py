"""What is written down of a run, and how it is taken up again: rows, events, commits, and their copy in MLflow."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, Unpack

from cluster.workers.clock import wall
from orchestrator.checkpoint import identity
from orchestrator.checkpoint.last_commit import LastCommit, last_commit, refuse_lost
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.reverify import Doubted
from orchestrator.checkpoint.snapshots import peer_store, rewind_all, rewind_memory
from orchestrator.checkpoint.store import Store
from orchestrator.config.redact import holds_secret, redact_message
from orchestrator.config.spec import JobSpec, dump
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.controller.evaluation_rows import EvaluationRows
from orchestrator.controller.events import EventHistory, Spending, memory_seen
from orchestrator.controller.node_rows import NodeRows
from orchestrator.controller.row_recovery import find, recovered
from orchestrator.controller.save_failures import SaveFailures
from orchestrator.controller.state import Phase, State
from orchestrator.controller.trace_beside import TraceBeside
from orchestrator.data.samples.skips import is_before, merged
from orchestrator.observe.notifier import TELLING, Notifier
from orchestrator.observe.sinks.follow import SinkProcess
from orchestrator.observe.totals import RunTotals, is_number, longest_step, median_step, totals_of
from orchestrator.observe.tracker import Tracker
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.document_writer import DocumentWriter
from orchestrator.storage.row_line import EVENTS, METRICS, evaluations_in
from orchestrator.storage.row_log import steps_text
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.row_writer import HOLD, RowWriter
from orchestrator.storage.run_directory import ORIGIN, Row, RunDir

RECENT = 200
"""Rows kept in memory, for a run may have millions."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for storage to take its last rows."""
LONGEST_WRITE = 180.0
"""Seconds after which the writing of rows and documents has ended, whatever storage does: each call has its bound."""


class RunHistory:
    """The history of one run in its directory, from all its controllers. Opening it adds an event.

    Rows, events and documents are written beside: who tells of them goes on while storage is silent. Whatever goes
    back in the run waits for that.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: RunDir,
        died: bool = False,
        log: ControllerLog | None = None,
        launched: float = 0.0,
    ) -> None:
        """`died` and `launched` are as of `Controller`; `log` is told of events. Raises InputError, before anything is
        written, if the directory is of another run."""
        _ = spec.train.dtype  # raises here where nobody has chosen it: what is written keeps it for life
        self._spec, self._run, self._log = spec, run, log or ControllerLog(run.uri)
        self.newest, extension = identity.take_up(spec, run)
        commit = self.newest  # that there was
        self.store = Store(run.commits)
        self._doubted = Doubted(self.store)
        self._peers: Store | None = None
        self._holders: tuple[str, tuple[Mapping[str, str], ...]] = ("", ())
        self._metrics = RowWriter(run, METRICS, 0.0 if run.local else HOLD, self._stored)
        self.evaluations = EvaluationRows(spec, run, self.store, lambda: self.tracker.evaluated())
        self.nodes = NodeRows(run, lambda rows: self.tracker.nodes())
        self._events, self._documents = RowWriter(run, EVENTS, stored=self._told), DocumentWriter(run)
        # Rows come before the events that speak of them.
        self._rows = self._metrics, self.evaluations.rows, self.nodes.rows, self._events
        self._writer = BackgroundWriter(self._write)
        self.saves = SaveFailures(spec.limits.unsaved)
        self._notifier = Notifier(spec.notify, spec.name, run.uri)
        self.event_history = EventHistory(run.rows(EVENTS), self._notifier)
        # Never changed in place: what asks for the status reads it from another thread.
        self.recent: tuple[Row, ...] = tuple(self._metrics.latest(RECENT))
        self.trace = TraceBeside(spec, self.planned)
        self.predicted_memory: float | None = None  # bytes of a rank under the present layout
        self.saved = 0
        """Rows since the last return to a commit that are stored."""
        self.spending = Spending(spec.limits, self.event_history)
        # What commits tell is told by events too, unless those were lost.
        self._committed = (commit.meta.get("attempt", 0), commit.meta.get("data", "")) if commit else (0, "")
        self._fenced, self._shards = self.store.fenced(), ""
        self._new = not (self.events or self.recent or commit or run.exists("job.yaml"))
        status = run.read_json_or_empty("status.json")
        stored = status.get("events")  # the number of the newest event, which may be lost
        number = max(self.event_history.number, stored if isinstance(stored, int) else 0)
        self.events_stored = self.event_history.number = number
        self._metrics.mark, self._checked = status.get("rows"), False
        begun = "resumed" if self.events or self.recent else "begun"
        run.write_text("job.yaml", text := dump(spec), private=holds_secret(text))
        nowhere = spec.model_copy(update={"tracking": None, "sinks": None})
        self.tracker, self._sinks = Tracker(nowhere, run), SinkProcess(nowhere, run)
        told: EventFields = {"last_seen": status["time"] if is_number(status.get("time")) else None}
        told["launched"] = 0.0 if died else launched
        if died:
            begun = f"resumed: the controller's process has ended, {memory_seen(status)}"
            told["controller_died"] = commit.step if commit else 0
        if extension is not None and self.event_history.length != extension.after:
            begun, told["extended"] = f"{begun}: {extension}", dataclasses.asdict(extension)
            told["lost_steps"] = max(self.step - extension.step, 0)
        self.event(self.attempts, self.step, "prepare", begun, **told)
        self._events.flush(now=True)  # MLflow is asked for the run that began, or was extended, with an event

    @property
    def events(self) -> list[Row]:
        """All that happened, the newest last."""
        return self.event_history.events

    @property
    def attempts(self) -> int:
        """Attempts that there have been; where events are lost, as many as rows and commits tell of. One that has
        fenced the commits may not have come to tell of itself."""
        rows = self.recent[-1]["attempt"] if self.recent else 0
        return max(self.event_history.attempts, rows, self._committed[0], self._fenced)

    def state(self, phase: Phase) -> State:
        """Where the run is when a controller takes it up, in that phase."""
        now, past = time.monotonic(), self.event_history
        commit = self.newest.step if self.newest else 0
        failures = past.failures(self._spec.limits.restart_window, wall(), now, commit)
        return State(phase, now, self.attempts, step=self.step, failures=failures, skips=past.skips)

    @property
    def data(self) -> str:
        """The prepared data that the run began with, empty before it has any."""
        return next((event["data"] for event in self.events if event.get("data")), self._committed[1])

    @property
    def base(self) -> dict[str, Any]:
        """The weights that the run began with, empty if it began anew or has not begun."""
        return (self.newest.meta.get(identity.BASE) if self.newest else None) or self.event_history.base

    @property
    def mark(self) -> dict[str, int] | None:
        """Where the stored rows end, for `RowWriter.missing`."""
        return self._metrics.mark

    @property
    def step(self) -> int:
        """The last step on record."""
        recent = self.recent
        return recent[-1]["step"] if recent else 0

    @property
    def step_seconds(self) -> float:
        """Median of the latest steps, 0 if there are none."""
        return median_step(self.recent)

    @property
    def longest_step(self) -> float:
        """Seconds of the longest of the latest steps of the attempt that runs, 0 if there are none."""
        return longest_step(self.recent)

    def event(self, attempt: int, step: int, phase: str, reason: str, **more: Unpack[EventFields]) -> None:
        """Add a row to events.jsonl, without the secrets that an error's message may have."""
        reason, fault = map(redact_message, (reason, more.get("first_fault") or ""))
        more["first_fault"] = fault or None
        self._log.event(step, phase, f"{reason}: {fault}" if fault else reason)
        self._metrics.hurry()
        if "tasks" in more:
            more["tasks"] = {**more["tasks"], "attempt": attempt}
        self._events.add([self.event_history.record(attempt, step, phase, reason, more)])
        self._events.hurry()
        self._writer.request()

    def planned(self, plan: dict[str, Any]) -> None:
        """Write plan.json, for the layout that starts or trains."""
        self.predicted_memory = plan["predicted"]["memory_bytes"]
        self.document("plan.json", plan)
        self.tracker.document("plan.json")

    def document(self, name: str, value: Any) -> None:
        """Replace a JSON document. Storage that refuses it is left alone for a while."""
        self._documents.add(name, value)
        if self._documents.due:
            self._writer.request()

    def _write(self) -> None:
        """Write what is due, and the latest of each document."""
        for rows in self._rows:
            rows.flush()
        self._documents.flush()

    def _stored(self, rows: Sequence[Row]) -> None:
        self.saved += len(rows)
        self.evaluations.rows.add(evaluations_in(rows))
        self.tracker.rows(rows)

    def _told(self, events: Sequence[Row]) -> None:
        self.events_stored = events[-1]["number"]

    def withdraw(self) -> bool:
        """Remove what this very record has written of a run that never began, for the job was wrong, and nothing once
        the run is known to be one that can run; whether it has been so."""
        if not self._new:
            return False
        self.close()  # else what is removed would be written after
        for name in ("status.json", EVENTS, "job.yaml"):
            with contextlib.suppress(OSError):
                self._run.remove(name)
        return True

    def same_shards(self, digest: str, data: str) -> str:
        """The digest itself. Raises InputError if the run reads other token shards."""
        identity.check_shards(self.newest, digest, data)
        if self._shards not in ("", digest):
            raise identity.wrong_shards(data)
        self._shards = digest
        return digest

    def track(self) -> None:
        """Begin to copy the run to MLflow; from here on it is known to be one that can run."""
        self._new = False
        self._log.keep()
        self._sinks = SinkProcess(self._spec, self._run)
        self.tracker = Tracker(self._spec, self._run)

    def training_began(self, attempt: int) -> float:
        """When the attempt's first step began, or the evaluation before it, unix seconds, as far as it is known."""
        first = next((row for row in self.recent if row["attempt"] == attempt), None)
        seconds = first["step_seconds"] + first.get("evaluation_seconds", 0.0) if first else 0.0
        return max(first["time"] - seconds if first else wall(), self.events[-1]["time"])

    def take(self, rows: Sequence[Row]) -> None:
        """Add the rows that a gang reported to metrics.jsonl; called often, since it also writes what has waited."""
        self._metrics.add(rows)
        if rows:
            self.recent = (*self.recent, *rows)[-RECENT:]
        self.trace.look(bool(rows))
        if any(rows.due for rows in self._rows):
            self._writer.request()

    def evaluated(self, row: Row) -> None:
        """Add the row of an evaluation that was made beside the run."""
        self.evaluations.rows.add([row])
        self._writer.request()

    def close(self) -> None:
        """Write nothing more than what is being written, and wait for that."""
        self.trace.stop()
        self._writer.close(LONGEST_WRITE)
        self._notifier.close(TELLING)
        self._sinks.close()
        self._log.close()

    def settle(self) -> None:
        """Have everything stored. Raises OSError, in words, if storage refuses it."""
        self._writer.wait(LONGEST_WRITE)
        for rows in self._metrics, self.evaluations.rows, self._events:
            rows.drain(PATIENCE)
        self.nodes.settle()

    def use_holders(self, token: str, holders: Sequence[Mapping[str, str]]) -> None:
        """Look for commits in the memory of these holders first, {"node", "address"} each."""
        self._holders = token, tuple(holders)
        self.leave_out(frozenset())

    def leave_out(self, lost: Set[str]) -> None:
        """Do not wait for the holders on these nodes, which do not answer."""
        token, holders = self._holders
        held = [holder["address"] for holder in holders if holder["node"] not in lost]
        self._peers = peer_store(token, held, held[:1]) if held else None

    def last_commit(self, bad: frozenset[int] = frozenset()) -> tuple[CommitManifest | None, list[str]]:
        """The newest commit but those in `bad` that are damaged indeed, those that have used samples which are to be
        left out and those of a decay before the run was extended, and a line for each passed over or doubted."""
        return (found := self._last_commit(bad))[0].commit, found[1]

    def _last_commit(self, bad: frozenset[int]) -> tuple[LastCommit, list[str]]:
        bad, notes = self._doubted.damaged(bad)
        found = last_commit(self._stores, bad, self._is_usable)
        return found, notes + [note for note in found.notes if note not in notes]

    def roll_back(self, bad: frozenset[int], attempt: int) -> tuple[CommitManifest | None, list[str]]:
        """Return to the last sound commit: what is beyond it never was. As `last_commit`; InputError as `refuse_lost`.

        From now on only that attempt may commit; what is left of earlier ones has lost its place.
        """
        self._run.require_lock()
        self._fenced = max(self._fenced, attempt)
        self.store.fence(attempt)
        if bad:  # the copy in memory may be what is damaged
            rewind_memory(self._peers, min(bad) - 1)
        found, notes = self._last_commit(bad)
        if (commit := found.commit) is None and not found.left_out:
            refuse_lost(self._run, found.unsound)
        step = commit.step if commit else 0
        self.evaluations.withdraw(step)
        rewind_all(self._peers, self.store, step if commit else -1)
        # Those of the steps before another run's commit, if it began with one, are that run's.
        first = int((self._run.read_json(ORIGIN) or {}).get("step", 0)) + 1
        carried = [row for row in commit.meta["rows"] if row["step"] >= first] if commit else []
        missing = [] if self._checked else self._metrics.missing(self._metrics.mark, first, step)
        self._metrics.cut(step, carried)
        if not self._metrics.problem:
            self._checked = True
            self.restore(self._metrics.missing(None, first, step) if missing else (), attempt, step)
            if lost := self.event_history.untold():
                reason = f"events {steps_text(lost)} were lost from {EVENTS}: what they told is in no figure"
                self.event(attempt, step, "wait", reason, missing_events=lost)
        self.recent = tuple(self._metrics.latest(RECENT))
        self.evaluations.cut(step, commit, evaluations_in(self.recent))
        self.saved = 0
        self.tracker.rows(carried)
        return commit, notes

    def restore(self, missing: Sequence[tuple[int, int]], attempt: int, step: int) -> bool:
        """Find rows again that storage has lost, and tell of those that are lost for good. Whether some were found."""
        if not missing or [list(gap) for gap in missing] == self.event_history.missing:
            return False
        found = find(self._spec, self._run, self._metrics.log, self.store, self.events, missing)
        if found:
            self._metrics.restore(list(found.values()))
        left, reason = recovered(missing, found)
        self.event(attempt, step, "wait", reason, missing_rows=left)
        return bool(found)

    def counted(self, attempt: int, step: int) -> RunTotals:
        """The rows of the whole run; what was lost of them and can be found again is put back first. Raises OSError if
        storage does not take what waits."""
        self.settle()
        rows = totals_of(self._run)
        return totals_of(self._run) if self.restore(rows.missing, attempt, step) else rows

    def beyond(self, step: int) -> list[Row]:
        """Rows of steps after that one."""
        recent = self.recent
        if recent and recent[0]["step"] <= step:
            return [row for row in recent if row["step"] > step]
        return list(itertools.takewhile(lambda row: row["step"] > step, self._metrics.newest()))[::-1]

    def _is_usable(self, commit: CommitManifest) -> bool:
        skips, ours = merged(commit.meta.get("skips", ())), self.event_history.skips
        return identity.is_shared(commit, self._spec) and is_before(commit.position, skips, ours)

    @property
    def _stores(self) -> list[Store]:
        return [self._peers, self.store] if self._peers else [self.store]

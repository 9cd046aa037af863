"""What is written down of a run, and how it is taken up again: rows, events, commits, and their copy in MLflow."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Unpack

from cluster.workers.clock import wall
from orchestrator.checkpoint import identity
from orchestrator.checkpoint.evaluations import attach
from orchestrator.checkpoint.last_commit import LastCommit, last_commit, refuse_lost
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit
from orchestrator.checkpoint.reverify import Doubted
from orchestrator.checkpoint.snapshots import peer_store, rewind_all, rewind_memory
from orchestrator.checkpoint.store import Store
from orchestrator.config.redact import holds_secret, redact_message
from orchestrator.config.spec import JobSpec, dump
from orchestrator.controller.background_trace import TraceBeside
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.controller.events import EventHistory, Spending, memory_seen
from orchestrator.controller.state import Phase, State, Stop
from orchestrator.data.samples.skips import is_before, merged
from orchestrator.observe.notifier import TELLING, Notifier
from orchestrator.observe.sinks.follow import SinkProcess
from orchestrator.observe.totals import RunTotals, is_number, longest_step, median_step, totals_of
from orchestrator.observe.tracker import Tracker, rows_on_server
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.document_writer import DocumentWriter
from orchestrator.storage.retry import storage_failed
from orchestrator.storage.row_line import EVALS, EVENTS, METRICS, NODES, Row, evaluations_in
from orchestrator.storage.row_log import RowLog, steps_text
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.row_writer import HOLD, RowWriter
from orchestrator.storage.run_directory import ORIGIN, RunDir

SERVER_PATIENCE = 60.0
"""Seconds that are given to a tracking server to tell what it has."""
MOST = 100_000
"""Rows that are asked of it at most."""

Gaps = Sequence[tuple[int, int]]


def find(
    spec: JobSpec, run: RunDir, log: RowLog, store: Store, events: Sequence[Row], missing: Gaps
) -> dict[int, Row]:
    """Rows of missing steps: those that are in the file, but not in their place; as the kept commits carry them; and
    else what MLflow has of them, which is their numbers."""
    found = {row["step"]: row for row in log.rows() if _among(row["step"], missing)}
    receipts = {}
    for step in store.steps():
        try:
            commit = store.manifest(step)
        except CorruptCommit:
            continue
        receipts[step] = commit.receipt
        carried = commit.meta.get("rows") or []
        found |= {row["step"]: row for row in carried if _among(row["step"], missing)}
    left = without(missing, found)
    if left and spec.tracking and sum(last - first + 1 for first, last in left) <= MOST:
        layouts = {e["attempt"]: str(e["layout_after"]) for e in events if e.get("layout_after")}
        for row in rows_on_server(spec, run, left, SERVER_PATIENCE):
            found[row["step"]] = _completed(row, layouts, receipts)
    return found


def recovered(missing: Gaps, found: dict[int, Row]) -> tuple[list[list[int]], str]:
    """The gaps that are left of the missing rows, and a line that tells of them."""
    left = [list(gap) for gap in without(missing, found)]
    reason = f"rows of step {steps_text(missing)} were lost from {METRICS}: {len(found)} are found again"
    return left, reason + (f", and those of step {steps_text(left)} are not" if left else "")


def without(missing: Gaps, found: dict[int, Row]) -> list[tuple[int, int]]:
    """What is still missing."""
    left: list[tuple[int, int]] = []
    for first, last in missing:
        for step in (step for step in range(first, last + 1) if step not in found):
            if left and left[-1][1] == step - 1:
                left[-1] = (left[-1][0], step)
            else:
                left.append((step, step))
    return left


def _completed(row: Row, layouts: dict[int, str], receipts: dict[int, str]) -> Row:
    """A row of MLflow with what can be said of its texts."""
    known: dict[str, Any] = {"samples": receipts.get(row["step"]), "layout": layouts.get(row["attempt"])}
    return {**row, **known, "copied_from": "mlflow"}


def _among(step: int, gaps: Gaps) -> bool:
    return any(first <= step <= last for first, last in gaps)


class EvaluationRows:
    """Writes `rows`; those of evaluations beside the run are added to their commits too, once they are stored."""

    def __init__(self, spec: JobSpec, run: RunDir, store: Store, stored: Callable[[], None]) -> None:
        """`stored` is called after rows of evaluations beside the run were."""
        self._beside = spec.evaluates_beside
        self._store, self._stored = store, stored
        self.rows = RowWriter(run, EVALS, stored=self._attach)
        self.latest: Row | None = None
        """The last one of this controller."""

    def withdraw(self, step: int) -> None:
        """Remove the rows after that step; called before the commits beyond it are removed, so that nothing is added to
        those any more."""
        self.rows.cut(step, ())

    def cut(self, step: int, commit: CommitManifest | None, carried: Sequence[Row]) -> None:
        """Go back to `step` and its commit. `carried` are the evaluations in the rows of the latest steps.

        One of the ranks of which the commit does not know is made again.
        """
        known = self._beside or (commit is not None and commit.meta.get("last_evaluation_step") == step)
        self.rows.cut(step if known else step - 1, carried)

    def _attach(self, rows: Sequence[Row]) -> None:
        self.latest = rows[-1] if rows else self.latest  # a cut stores none
        if not self._beside:
            return
        self._stored()
        try:
            for row in rows:
                attach(self._store, row)
        except Exception as error:  # the next who looks for what waits makes up for it
            if not storage_failed(error):
                raise


NODES_PATIENCE = 10.0
NODES_HOLD = 10.0
"""Seconds that rows are buffered on an object store, where every write makes an object."""


class NodeRows:
    """Numbers readings and writes them; `latest` has the last values of each node that the gang runs on.

    A number is that of the millisecond, or one more than that of the row before: so it also grows from one controller
    to the next, which need not read what there is.
    """

    def __init__(self, run: RunDir, stored: Callable[[Sequence[Row]], None]) -> None:
        self.rows = RowWriter(run, NODES, 0.0 if run.local else NODES_HOLD, stored)
        self.latest: dict[str, dict[str, float]] = {}
        self._number, self._attempt = 0, 0

    def add(self, readings: Sequence[dict[str, Any]], attempt: int) -> None:
        """Add what a gang of that attempt reported."""
        if not readings:
            return
        kept = self.latest if attempt == self._attempt else {}
        self._attempt = attempt
        # A new one each time: what asks for the status reads it from another thread.
        self.latest = kept | {reading["node"]: reading["values"] for reading in readings}
        rows: list[Row] = []
        for reading in readings:
            self._number = max(self._number + 1, int(1000 * reading["time"]))
            rows.append({"number": self._number, "attempt": attempt, **reading})
        self.rows.add(rows)

    def settle(self) -> None:
        """Have all stored, if storage takes it within some seconds: no run fails for want of these."""
        with contextlib.suppress(OSError):
            self.rows.drain(NODES_PATIENCE)


class SaveFailures:
    """Sees the outcome of every save. A run whose saves fail for longer than `limit` seconds is to stop."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._failing: tuple[float, str] | None = None  # since when, and why the last one did
        self._remark: str | None = None

    def note(self, outcome: dict[str, Any]) -> str:
        """What is to be told of a save that has ended; empty for one that went well, as the ones before."""
        if outcome["state"] == "failed":
            self._failing = (self._failing[0] if self._failing else time.monotonic(), outcome["reason"])
            return f"the save at step {outcome['step']} failed: {outcome['reason']}"
        message = f"saving resumes with the commit at step {outcome['step']}" if self._failing else ""
        self._failing = None
        # The commit stands, and yet: old commits could not be removed. Told when it begins.
        begins, self._remark = outcome["reason"] and not self._remark, outcome["reason"]
        return message or (f"after the commit at step {outcome['step']} {self._remark}" if begins else "")

    def stop(self) -> Stop | None:
        """The stop of a run whose saves have failed for as long as the job allows; None before."""
        now = time.monotonic()
        since, why = self._failing or (now, "")
        if now - since < self._limit:
            return None
        text = (
            f"limits.unsaved is reached: every save has failed for {now - since:.0f} s, the last one: {why}"
        )
        return Stop("limit", text)


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

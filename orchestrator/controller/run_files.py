"""The files of a run that its controller writes: rows of steps, events, evaluations and nodes, and JSON documents."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from cluster.workers.node_metrics import CPU_JOULES, GPU_JOULES, LONGEST_INTERVAL, SECONDS
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import attach
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.controller.run_copies import RunCopies
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.document_writer import DocumentWriter
from orchestrator.storage.retry import storage_failed
from orchestrator.storage.row_line import EVALS, EVENTS, METRICS, NODES, Row, evaluations_in
from orchestrator.storage.row_writer import HOLD, RowWriter
from orchestrator.storage.run_directory import RunDir

LISTED = 128
"""Numbers that a row has in each of its lists, in the mean. The lists of larger gangs are left out of most rows."""
BUSY, MEMORY = "busy_seconds", "memory_bytes_by_rank"


class RankLists:
    """Leaves the lists by rank out of the rows of a gang with more than LISTED ranks, but for the first row of an
    attempt and one in so many that a row has LISTED numbers in the mean.
    """

    def __init__(self) -> None:
        self._attempt = 0
        """The attempt of the last row with lists."""
        self._memory: list[int] = []
        """The last peaks by rank that no row has."""

    def thin(self, row: Row) -> Row:
        """Return the row as it is to be stored. Call it for each row, in order."""
        memory = row.get(MEMORY) or (self._memory if row["attempt"] == self._attempt else [])
        every = -(-max(len(row.get(BUSY) or ()), len(memory)) // LISTED)
        if row["attempt"] == self._attempt and every > 1 and row["step"] % every:
            self._memory = memory
            return {key: value for key, value in row.items() if key not in (BUSY, MEMORY)}
        self._attempt, self._memory = row["attempt"], []
        return {**row, MEMORY: memory} if memory else row


MOST_NODES = 64
"""Nodes whose readings are all stored. More nodes share the rows that these would have."""
NODES_PATIENCE = 10.0
"""Seconds that the end of a run waits until the readings of nodes are stored."""


NODES_HOLD = 10.0
"""Seconds that rows are buffered on an object store, where every write makes an object."""


class NodeRows:
    """Numbers the readings of nodes and writes them to nodes.jsonl.

    A row's number is the time of its reading in milliseconds, or the previous number plus one if that is larger. So
    numbers also grow from one controller to the next, without reading the file.

    Of more than MOST_NODES nodes, several readings of a node become one row: the last one, with the seconds and joules
    of all.

    Attributes:
        rows: the writer of nodes.jsonl.
        latest: the last values of each node that the gang runs on, by node.
    """

    def __init__(self, run: RunDir, stored: Callable[[Sequence[Row]], None]) -> None:
        """`stored` is called with rows once they are stored."""
        hold = 0.0 if run.local else NODES_HOLD
        self.rows = RowWriter(run, NODES, hold=hold, stored=stored)
        self.latest: dict[str, dict[str, float]] = {}
        self._number = 0
        self._attempt = 0
        self._held: dict[str, dict[str, Any]] = {}
        """What no row has yet, by node."""

    def add(self, node_metrics: Sequence[dict[str, Any]], attempt: int) -> None:
        """Add the readings that the gang of `attempt` reported."""
        if not node_metrics:
            return
        previous = self.latest
        if attempt != self._attempt:
            self._store(list(self._held.values()))
            previous = {}
        self._attempt = attempt
        # A new dictionary each time, because `status` reads it from another thread.
        self.latest = previous | {metrics["node"]: metrics["values"] for metrics in node_metrics}
        nodes = len(self.latest)
        interval = LONGEST_INTERVAL * nodes / MOST_NODES if nodes > MOST_NODES else 0.0
        due = []
        for metrics in node_metrics:
            whole = _sum_of(self._held.pop(metrics["node"], None), metrics)
            if whole["values"].get(SECONDS, 0.0) < interval:
                self._held[metrics["node"]] = whole
            else:
                due.append(whole)
        self._store(due)

    def _store(self, node_metrics: Sequence[dict[str, Any]]) -> None:
        """Add a row for each of these readings, which are held no longer."""
        rows: list[Row] = []
        for metrics in node_metrics:
            self._held.pop(metrics["node"], None)
            self._number = max(self._number + 1, int(1000 * metrics["time"]))
            rows.append({"number": self._number, "attempt": self._attempt, **metrics})
        self.rows.add(rows)

    def wait_until_stored(self) -> None:
        """Wait up to NODES_PATIENCE until all rows are stored. Storage errors are ignored: no run fails over these."""
        self._store(list(self._held.values()))
        with contextlib.suppress(OSError):
            self.rows.drain(NODES_PATIENCE)


def _sum_of(before: dict[str, Any] | None, reading: dict[str, Any]) -> dict[str, Any]:
    """Return a reading with the seconds and joules of those before it too. A sum that lacks a part is left out."""
    if before is None:
        return reading
    earlier, values = before["values"], dict(reading["values"])
    for key in (SECONDS, CPU_JOULES, GPU_JOULES):
        if key in values and key in earlier:
            values[key] = round(values[key] + earlier[key], 3)
        else:
            values.pop(key, None)
    return {**reading, "values": values}


class EvaluationRows:
    """Writes evals.jsonl. With background evaluation, it also attaches each stored row to the commit it evaluates.

    Attributes:
        rows: the writer of evals.jsonl.
        latest: the newest row that this controller has stored, None before the first.
    """

    def __init__(self, evaluates_beside: bool, run: RunDir, store: Store, stored: Callable[[], None]) -> None:
        """`stored` is called after rows of background evaluations are stored."""
        self._is_beside = evaluates_beside
        self._store = store
        self._on_stored = stored
        self.rows = RowWriter(run, EVALS, stored=self._attach)
        self.latest: Row | None = None

    def withdraw(self, step: int) -> None:
        """Remove the rows after `step`.

        Call it before the commits after `step` are removed, so that no row is attached to one of those.
        """
        self.rows.cut(step, ())

    def cut(self, step: int, commit: CommitManifest | None, carried: Sequence[Row]) -> None:
        """Roll back to `step`.

        An evaluation by the ranks at `step` that the commit does not mention is removed, because it is run again.

        Args:
            step: the step to return to.
            commit: the commit at `step`, None at step 0.
            carried: the evaluations in the rows of the latest steps.
        """
        is_known = self._is_beside or (commit is not None and commit.meta.get("last_evaluation_step") == step)
        self.rows.cut(step if is_known else step - 1, carried)

    def _attach(self, rows: Sequence[Row]) -> None:
        if rows:  # a cut stores none
            self.latest = rows[-1]
        if not self._is_beside:
            return
        self._on_stored()
        try:
            for row in rows:
                attach(self._store, row)
        except Exception as error:  # the next search for waiting commits attaches the row
            if not storage_failed(error):
                raise


RECENT = 200
"""Rows kept in memory, because a run may have millions."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for storage to take its last rows."""
LONGEST_WRITE = 180.0
"""Seconds after which a write of rows and documents has ended, whatever storage does, since each call is bounded."""


class RunFiles:
    """Writes the files from a background thread, so callers never block on storage, except in `wait_until_stored`.

    Attributes:
        metrics: the writer of metrics.jsonl, a row a step.
        evaluations: the rows of evals.jsonl.
        nodes: the rows of nodes.jsonl.
        recent: the last RECENT rows of metrics.jsonl.
        saved: how many rows of steps have been stored since the run last returned to a commit.
        events_stored: the number of the newest event that is stored.
    """

    def __init__(self, run: RunDir, store: Store, evaluates_beside: bool, copies: RunCopies) -> None:
        """Write nothing yet.

        Args:
            run: the run directory.
            store: its commits, which evaluations are attached to.
            evaluates_beside: whether commits are evaluated in the background.
            copies: follow what is stored.
        """
        self._run = run
        self._copies = copies
        self.metrics = RowWriter(run, METRICS, hold=0.0 if run.local else HOLD, stored=self._on_steps_stored)
        self._events = RowWriter(run, EVENTS, stored=self._on_events_stored)
        self.evaluations = EvaluationRows(
            evaluates_beside, run, store, stored=lambda: copies.tracker.evaluated()
        )
        self.nodes = NodeRows(run, stored=lambda rows: copies.tracker.nodes())
        self._lists = RankLists()
        # Rows are written before the events that mention them.
        self._row_writers = (self.metrics, self.evaluations.rows, self.nodes.rows, self._events)
        self._documents = DocumentWriter(run)
        self._writer = BackgroundWriter(self._write)
        # Replaced and never modified, because `status` reads it from another thread.
        self.recent: tuple[Row, ...] = tuple(self.metrics.latest(RECENT))
        self.saved = 0
        self.events_stored = 0

    def add_steps(self, rows: Sequence[Row]) -> None:
        """Add rows of steps. Call it often, because it also starts due writes of all files."""
        rows = [self._lists.thin(row) for row in rows]
        self.metrics.add(rows)
        if rows:
            self.recent = (*self.recent, *rows)[-RECENT:]
        if any(writer.due for writer in self._row_writers):
            self._writer.request()

    def add_event(self, event: Row) -> None:
        """Add an event, and write it and all rows of steps soon."""
        self.metrics.hurry()
        self._events.add([event])
        self._events.hurry()
        self._writer.request()

    def write_events(self) -> None:
        """Write the events in the calling thread."""
        self._events.flush(now=True)

    def add_evaluation(self, row: Row) -> None:
        """Add the row of a background evaluation."""
        self.evaluations.rows.add([row])
        self._writer.request()

    def write_document(self, name: str, value: Any) -> None:
        """Replace a JSON document. After storage refuses one, the next try waits for a while."""
        self._documents.add(name, value)
        if self._documents.due:
            self._writer.request()

    def after(self, step: int) -> list[Row]:
        """Return the rows of the steps after `step`."""
        recent = self.recent
        if recent and recent[0]["step"] <= step:
            return [row for row in recent if row["step"] > step]
        return list(itertools.takewhile(lambda row: row["step"] > step, self.metrics.newest()))[::-1]

    def resume_from(self, step: int, commit: CommitManifest | None) -> None:
        """Continue after the rows of steps were cut to those up to `step`, of the commit that the run returns to."""
        self.recent = tuple(self.metrics.latest(RECENT))
        self.evaluations.cut(step, commit, evaluations_in(self.recent))
        self.saved = 0

    def wait_until_stored(self) -> None:
        """Wait until everything is stored. Raises OSError with a plain message if storage refuses it."""
        self._writer.wait(LONGEST_WRITE)
        for writer in (self.metrics, self.evaluations.rows, self._events):
            writer.drain(PATIENCE)
        self.nodes.wait_until_stored()

    def close(self) -> None:
        """Wait for the write in progress, and write nothing more."""
        self._writer.close(LONGEST_WRITE)

    def remove(self) -> None:
        """Remove what a run has before it starts. Call it after `close`, so that nothing is written afterwards."""
        for name in ("status.json", EVENTS, "job.yaml"):
            with contextlib.suppress(OSError):
                self._run.remove(name)

    def _write(self) -> None:
        """Write the rows that are due, and the latest version of each document. Runs in the background thread."""
        for writer in self._row_writers:
            writer.flush()
        self._documents.flush()

    def _on_steps_stored(self, rows: Sequence[Row]) -> None:
        self.saved += len(rows)
        self.evaluations.rows.add(evaluations_in(rows))
        self._copies.tracker.rows(rows)

    def _on_events_stored(self, events: Sequence[Row]) -> None:
        self.events_stored = events[-1]["number"]

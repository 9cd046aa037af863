"""The files of a run that its controller writes: rows of steps, events, evaluations and nodes, and JSON documents."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.controller.evaluation_rows import EvaluationRows
from orchestrator.controller.node_rows import NodeRows
from orchestrator.controller.rank_lists import RankLists
from orchestrator.controller.run_copies import RunCopies
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.document_writer import DocumentWriter
from orchestrator.storage.row_line import EVENTS, METRICS, Row, evaluations_in
from orchestrator.storage.row_writer import HOLD, RowWriter
from orchestrator.storage.run_directory import RunDir

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

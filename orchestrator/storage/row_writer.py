"""Buffers rows before they are stored: for a few seconds on an object store, and for as long as storage fails.

No row is lost: ranks keep rows until storage is confirmed, and every commit carries the unconfirmed rows. One thread
adds rows; another may write them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from orchestrator.config.errors import one_line
from orchestrator.storage.retry import storage_failed
from orchestrator.storage.row_log import gaps
from orchestrator.storage.run_directory import Row, RunDir

HOLD = 5.0
"""Seconds that rows are buffered on an object store, because every write creates an object."""
LONGEST_PAUSE = 30.0
"""Maximum seconds between tries while storage fails."""


class RowWriter:
    """Writes the rows of one file of a run directory, and reads both stored and waiting rows."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        hold: float = 0.0,
        stored: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> None:
        """
        Args:
            run: the run directory.
            name: the row file in it.
            hold: seconds that rows may wait for others before they are written.
            stored: called with rows that were added, once they are stored.
        """
        self.log = run.log(name)
        self._uri = run.at(name)
        self._hold = hold
        self._stored = stored
        self._writing = threading.RLock()  # held while writing, and while a pending cut changes
        self._waiting: list[Row] = []
        self._cut: tuple[int, list[Row]] | None = (
            None  # a pending cut: the last step to keep, and the rows to keep
        )
        self._due = 0.0
        self._pause = 0.0
        self.problem = ""
        self.mark: dict[str, int] | None = None
        """The last stored row: {"step": its step, "bytes": the offset of its end}; None before the first."""

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows to be written."""
        if rows and not self._waiting:
            self._due = max(self._due, time.monotonic() + self._hold)
        self._waiting += rows

    def hurry(self) -> None:
        """Make the next `flush` write the waiting rows."""
        self._due = 0.0

    @property
    def due(self) -> bool:
        """Return whether a flush would write anything."""
        return bool(self._waiting or self._cut is not None) and time.monotonic() >= self._due

    def flush(self, now: bool = False) -> int:
        """Write the waiting rows if they are due, or if `now` is set; return how many were stored.

        A later flush repeats a failed write, with growing pauses. Until one succeeds, `problem` is the error.
        """
        with self._writing:
            if now:
                self.hurry()
            if not self.due:
                return 0
            rows = list(self._waiting)
            try:
                self._write(rows)
            except Exception as error:
                if not storage_failed(error):
                    raise
                self.problem = one_line(error)
                self._pause = min(max(2 * self._pause, 1.0), LONGEST_PAUSE)
                self._due = time.monotonic() + self._pause
                return 0
            del self._waiting[: len(rows)]  # first, so that rows are not written again if the callback fails
            self._pause = 0.0
            self.problem = ""
            self._stored(rows)
            return len(rows)

    def drain(self, timeout: float) -> None:
        """Write all waiting rows within `timeout` seconds. Raises OSError, with the last error, if storage fails."""
        end = time.monotonic() + timeout
        self.flush(now=True)
        while self.problem and time.monotonic() < end:
            time.sleep(0.2)
            self.flush()
        if self.problem:
            hint = "repair the storage, and the same command continues from the last checkpoint"
            raise OSError(f"rows could not be written to {self._uri}: {self.problem}; {hint}")

    def newest(self) -> Iterator[Row]:
        """Yield the valid rows, waiting or stored, newest first, one for each step. Reads lazily."""
        at_most, held = self._cut or (None, [])
        lowest: float = float("inf")
        for row in reversed([*held, *self._waiting]):
            if row["step"] < lowest:
                lowest = row["step"]
                yield row
        for row in self.log.newest():
            if row["step"] < lowest and (at_most is None or row["step"] <= at_most):
                yield row

    def latest(self, count: int) -> list[Row]:
        """Return the last `count` valid rows, oldest first."""
        return list(islice(self.newest(), count))[::-1]

    def cut(self, step: int, rows: Sequence[Row]) -> None:
        """Remove all rows after `step`, and add those of `rows` up to that step that are missing."""
        with self._writing:
            held = [] if self._cut is None else [row for row in self._cut[1] if row["step"] <= step]
            kept = {row["step"]: row for row in [*held, *self._waiting, *rows] if row["step"] <= step}
            step = step if self._cut is None else min(step, self._cut[0])
            self._cut = (step, [kept[n] for n in sorted(kept)])
            self._waiting = []
            self.flush(now=True)

    def missing(self, mark: Any, first: int, last: int) -> list[tuple[int, int]]:
        """Return the steps from `first` to `last` that are not stored, as pairs (first, last) of each gap.

        If the row of an earlier `mark` still ends at the same byte, nothing before it was removed, and only the rest
        is read. Otherwise the whole file is read.
        """
        start = 0
        if isinstance(mark, dict) and type(mark.get("bytes")) is int and type(mark.get("step")) is int:
            before = next(self.log.backward(mark["bytes"]), None)
            if before and before.row and (before.row["step"], before.end) == (mark["step"], mark["bytes"]):
                start = before.end
                first = max(first, before.row["step"] + 1)
        return gaps(self.log.extents(start), first, last)

    def restore(self, rows: Sequence[Row]) -> None:
        """Insert recovered rows in order, and drop torn or altered lines. Raises OSError."""
        with self._writing:
            self.log.insert(self.log.extents(), rows)
            self.mark = None

    def _write(self, rows: Sequence[Row]) -> None:
        if self._cut is not None:
            step, kept = self._cut
            last = self.log.cut(step)
            self.mark = {"step": last, "bytes": self.log.size()} if last else None
            self._append([row for row in kept if row["step"] > last])
            self._cut = None
        self._append(rows)

    def _append(self, rows: Sequence[Row]) -> None:
        if rows:
            size = self.log.append(rows)
            self.mark = {"step": rows[-1].get("step", 0), "bytes": size}

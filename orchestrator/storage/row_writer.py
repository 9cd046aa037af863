"""Rows on their way to storage: held back a little where each writing is an object, and as long as storage refuses.

Nothing is lost by that: ranks keep rows until they are told that they are stored, and every commit carries those.
One thread adds rows, and may have another one write them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from orchestrator.job.errors import one_line
from orchestrator.storage.retry import storage_failed
from orchestrator.storage.row_log import gaps
from orchestrator.storage.run_directory import Row, RunDir

HOLD = 5.0
"""Seconds that rows wait for others on an object store, where rows written together are one object."""
LONGEST_PAUSE = 30.0
"""Seconds between tries at most while storage refuses."""


class Rows:
    """The rows of one file of a run directory, stored and waiting."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        hold: float = 0.0,
        stored: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> None:
        """`hold` is how many seconds rows may wait for others before they are written; `stored` hears of those that
        were added and are now stored."""
        self.log = run.log(name)
        self._place, self._hold, self._stored = run.at(name), hold, stored
        self._writing = threading.RLock()  # held by who writes, or says what is to be cut
        self._waiting: list[Row] = []
        self._cut: tuple[int, list[Row]] | None = None  # the last step to stay, and the rows up to it
        self._due, self._pause = 0.0, 0.0
        self.problem = ""
        self.mark: dict[str, int] | None = None
        """The last row that is stored, {"step": its step, "bytes": where it ends}; None if none was stored yet."""

    def add(self, rows: Sequence[Row]) -> None:
        """Rows to be written."""
        if rows and not self._waiting:
            self._due = max(self._due, time.monotonic() + self._hold)
        self._waiting += rows

    def hurry(self) -> None:
        """Have what waits written with the next flush."""
        self._due = 0.0

    @property
    def due(self) -> bool:
        """Whether there is something that a flush would write."""
        return bool(self._waiting or self._cut is not None) and time.monotonic() >= self._due

    def flush(self, now: bool = False) -> int:
        """Write what waits if it is due, or `now`. Returns how many of the rows that were added were stored.

        Storage that refuses them is tried again later, with growing pauses; `problem` says meanwhile what it says.
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
            self._stored(rows)
            del self._waiting[: len(rows)]
            self._pause, self.problem = 0.0, ""
            return len(rows)

    def settle(self, patience: float) -> None:
        """Write all that waits, within so many seconds. Raises OSError, in words, if storage refuses it."""
        end = time.monotonic() + patience
        self.flush(now=True)
        while self.problem and time.monotonic() < end:
            time.sleep(0.2)
            self.flush()
        if self.problem:
            raise OSError(f"rows could not be written to {self._place}: {self.problem}")

    def newest(self) -> Iterator[Row]:
        """One row a step, waiting and stored, from the newest on; only as much is read as is taken."""
        at_most, held = self._cut or (None, [])
        least: float = float("inf")
        for row in reversed([*held, *self._waiting]):
            if row["step"] < least:
                least = row["step"]
                yield row
        for row in self.log.newest():
            if row["step"] < least and (at_most is None or row["step"] <= at_most):
                yield row

    def latest(self, count: int) -> list[Row]:
        """The last so many rows, oldest first."""
        return list(islice(self.newest(), count))[::-1]

    def cut(self, step: int, rows: Sequence[Row]) -> None:
        """Drop all rows of later steps, and add those of `rows` that are not there: they are up to that step."""
        with self._writing:
            held = [] if self._cut is None else [row for row in self._cut[1] if row["step"] <= step]
            kept = {row["step"]: row for row in [*held, *self._waiting, *rows] if row["step"] <= step}
            step = step if self._cut is None else min(step, self._cut[0])
            self._cut, self._waiting = (step, [kept[n] for n in sorted(kept)]), []
            self.flush(now=True)

    def missing(self, mark: Any, first: int, last: int) -> list[tuple[int, int]]:
        """Steps from `first` to `last` that are not stored, as pairs of the first and the last of each gap.

        Where the row of a `mark` of earlier ends where it ended then, nothing before it was taken away, and only what
        is behind it is read; else everything is.
        """
        start = 0
        if isinstance(mark, dict) and type(mark.get("bytes")) is int and type(mark.get("step")) is int:
            before = next(self.log.backward(mark["bytes"]), None)
            if before and before.row and (before.row["step"], before.end) == (mark["step"], mark["bytes"]):
                start, first = before.end, max(first, before.row["step"] + 1)
        return gaps(self.log.extents(start), first, last)

    def restore(self, rows: Sequence[Row]) -> None:
        """Put rows that were found again in their places, and leave out what is no row. Raises OSError."""
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

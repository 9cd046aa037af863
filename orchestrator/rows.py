"""Rows on their way to storage: held back a little where each writing is an object, and as long as storage refuses.

Nothing is lost by that: ranks keep rows until they are told that they are stored, and every commit carries those.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.checkpoint.committer import one_line
from orchestrator.rundir import Row, RunDir
from orchestrator.storage.retry import storage_failed

HOLD = 5.0
"""Seconds that rows wait for others on an object store, where rows written together are one object."""
LONGEST_PAUSE = 30.0
"""Seconds between tries at most while storage refuses."""


class Rows:
    """The rows of one file of a run directory, stored and waiting."""

    def __init__(self, run: RunDir, name: str, hold: float = 0.0) -> None:
        """`hold` is how many seconds rows may wait for others before they are written."""
        self._run, self._name, self._hold = run, name, hold
        self._waiting: list[Row] = []
        self._instead: list[Row] | None = None
        self._due, self._pause = 0.0, 0.0
        self.problem = ""

    def add(self, rows: Sequence[Row]) -> None:
        """Rows to be written."""
        if rows and not self._waiting:
            self._due = max(self._due, time.monotonic() + self._hold)
        self._waiting += rows

    def flush(self, now: bool = False) -> int:
        """Write what waits if it is due, or `now`. Returns how many rows were stored.

        Storage that refuses them is tried again later, with growing pauses; `problem` says meanwhile what it says.
        """
        if not self._waiting and self._instead is None:
            return 0
        if not now and time.monotonic() < self._due:
            return 0
        try:
            if self._instead is not None:
                self._run.replace_rows(self._name, self._instead)
                self._instead = None
            self._run.append(self._name, self._waiting)
        except Exception as error:
            if not storage_failed(error):
                raise
            self.problem = one_line(error)
            self._pause = min(max(2 * self._pause, 1.0), LONGEST_PAUSE)
            self._due = time.monotonic() + self._pause
            return 0
        stored, self._waiting = len(self._waiting), []
        self._pause, self.problem = 0.0, ""
        return stored

    def settle(self, patience: float) -> None:
        """Write all that waits, within so many seconds. Raises OSError, in words, if storage refuses it."""
        end = time.monotonic() + patience
        self.flush(now=True)
        while self.problem and time.monotonic() < end:
            time.sleep(0.2)
            self.flush()
        if self.problem:
            raise OSError(f"rows could not be written to {self._run.at(self._name)}: {self.problem}")

    def all(self) -> list[Row]:
        """Stored and waiting rows, oldest first."""
        stored = self._run.rows(self._name) if self._instead is None else self._instead
        return [*stored, *self._waiting]

    def exchange(self, rows: Sequence[Row]) -> None:
        """Let these be all rows there are."""
        stored = self._run.rows(self._name) if self._instead is None else None
        self._waiting = []
        if stored != list(rows):
            self._instead = list(rows)
            self.flush(now=True)

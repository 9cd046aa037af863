"""Reading a file that other processes write, in a background thread, so that slow storage blocks nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.run_directory import RunDir

EVERY = 1.0
"""Seconds between two reads on a local file system."""
EVERY_REMOTE = 5.0
"""Seconds between two reads on an object store."""


class BackgroundReader:
    """Reads a JSON object of a run directory again and again, as long as `look` is called."""

    def __init__(self, run: RunDir, name: str, on_read: Callable[[dict[str, Any]], None]) -> None:
        """Read nothing yet.

        Args:
            run: the run directory.
            name: the file.
            on_read: called in the thread with the content of each read, empty if the file is missing or damaged.
        """
        self._run = run
        self._name = name
        self._on_read = on_read
        self._interval = EVERY if run.local else EVERY_REMOTE
        self._read_at = 0.0
        """The monotonic time of the last read."""
        self._thread = BackgroundWriter(self._read)

    def look(self) -> None:
        """Begin a read if it is time for one. Does not wait for storage."""
        if time.monotonic() - self._read_at >= self._interval:
            self._read_at = time.monotonic()
            self._thread.request()

    def close(self, seconds: float) -> None:
        """Stop reading. Wait at most this long for a read that storage does not answer."""
        self._thread.close(seconds)

    def _read(self) -> None:
        try:
            content = self._run.read_json_or_empty(self._name)
        except Exception:  # whatever a store raises, the next read may succeed
            return
        self._on_read(content)

"""Writes JSON documents of a run directory; only the latest version of each is kept."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.storage.retry import storage_failed
from orchestrator.storage.run_directory import RunDir

PAUSE = 5.0
"""Seconds to wait after a document could not be written."""


class DocumentWriter:
    """One thread adds documents; another thread may write them."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._waiting = dict[str, Any]()
        self._refused = -PAUSE  # monotonic time at which a write last failed

    def add(self, name: str, value: Any) -> None:
        """Replace the document `name` at the next flush."""
        self._waiting[name] = value

    @property
    def due(self) -> bool:
        """Return whether a flush would write anything."""
        return bool(self._waiting) and time.monotonic() - self._refused >= PAUSE

    def flush(self) -> None:
        """Write the waiting documents. Documents that storage refuses keep waiting."""
        while self.due:
            name, value = self._waiting.popitem()
            try:
                self._run.write_json(name, value)
            except Exception as error:
                if not storage_failed(error):
                    raise
                self._waiting.setdefault(name, value)
                self._refused = time.monotonic()

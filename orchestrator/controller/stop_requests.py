"""A stop that another process asks for, by a file in the run directory: it needs no way to the controller."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir

REQUEST = "stop.json"
"""The latest request: {"controller", "reason"}. It names the process that is asked, so later controllers ignore it."""
EVERY = 1.0
"""Seconds between two reads of the request on a local file system."""
EVERY_REMOTE = 5.0
"""Seconds between two reads of the request on an object store."""
WAITS = 5.0
"""Seconds that the end of a run waits at most for a read that storage does not answer."""


class StopAsked:
    """Asks the controllers of a run to stop, each once: Ray may restart a controller before it has heard."""

    def __init__(self, run: RunDir, reason: str) -> None:
        self._run = run
        self._reason = reason
        self._asked: Any = None

    def ask(self, status: Row) -> bool:
        """Ask the controller that wrote this status. Return whether there is one that can be asked."""
        controller = next(iter(status.get("processes") or ()), None)
        if controller is not None and controller != self._asked:
            self._run.write_json(REQUEST, {"controller": controller, "reason": self._reason})
            self._asked = controller
        return controller is not None


class StopRequests:
    """Reads the request for one controller in a background thread, so that storage never blocks the run."""

    def __init__(self, run: RunDir, controller: Mapping[str, Any]) -> None:
        """Read nothing yet. `controller` is the identity of its process, as in status.json."""
        self._run = run
        self._controller = dict(controller)
        self._interval = EVERY if run.local else EVERY_REMOTE
        self._read_at = 0.0
        self._reason = ""
        self._thread = BackgroundWriter(self._read)

    def look(self) -> str:
        """Return the reason of a stop that was asked for; empty without one."""
        if time.monotonic() - self._read_at >= self._interval:
            self._read_at = time.monotonic()
            self._thread.request()
        return self._reason

    def close(self) -> None:
        """Stop reading."""
        self._thread.close(WAITS)

    def _read(self) -> None:
        try:
            request = self._run.read_json_or_empty(REQUEST)
        except Exception:  # whatever a store raises, the next read may succeed
            return
        if request.get("controller") == self._controller:
            self._reason = str(request.get("reason") or "stopped by request")

"""A stop that another process asks for, by a file in the run directory: it needs no way to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.storage.background_reader import BackgroundReader
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir

REQUEST = "stop.json"
"""The latest request: {"controller", "reason"}. It names the process that is asked, so later controllers ignore it."""
WAITS = 5.0
"""Seconds that the end of a run waits at most for a read that storage does not answer."""


class StopSender:
    """Asks the controllers of a run to stop, each once: Ray may restart a controller before it has heard."""

    def __init__(self, run: RunDir, reason: str) -> None:
        self._run = run
        self._reason = reason
        self._requested_of: Any = None

    def ask(self, status: Row) -> bool:
        """Ask the controller that wrote this status. Return whether there is one that can be asked."""
        controller = next(iter(status.get("processes") or ()), None)
        if controller is not None and controller != self._requested_of:
            self._run.write_json(REQUEST, {"controller": controller, "reason": self._reason})
            self._requested_of = controller
        return controller is not None


class StopRequests:
    """Reads the request for one controller."""

    def __init__(self, run: RunDir, controller: Mapping[str, Any]) -> None:
        """Read nothing yet. `controller` is the identity of its process, as in status.json."""
        self._controller = dict(controller)
        self._reason = ""
        self._reader = BackgroundReader(run, REQUEST, self._received)

    def look(self) -> str:
        """Return the reason of a stop that was asked for; empty without one."""
        self._reader.look()
        return self._reason

    def close(self) -> None:
        """Stop reading."""
        self._reader.close(WAITS)

    def _received(self, request: dict[str, Any]) -> None:
        if request.get("controller") == self._controller:
            self._reason = str(request.get("reason") or "stopped by request")

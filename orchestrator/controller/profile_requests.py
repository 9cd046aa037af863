"""Requests to profile some steps, which commands write to the run directory."""

from __future__ import annotations

from typing import Any

from orchestrator.storage.background_reader import BackgroundReader
from orchestrator.storage.run_directory import RunDir

REQUEST = "profiles/request.json"
"""The latest profile request: {"id", "ranks", "steps"}. Results go to the folder next to it that is named by the id."""
WAITS = 30.0
"""Seconds that the end of a run waits at most for a read that storage does not answer."""


class ProfileRequests:
    """Reads profile requests from the run directory in a background thread. Returns each request once."""

    def __init__(self, run: RunDir) -> None:
        """Start without a request: one that is already there was meant for an earlier controller."""
        self._is_first_read = True
        self._last_id = ""
        """The id of the last request that was read."""
        self._new: dict[str, Any] = {}
        """The request that `take` has not returned yet."""
        self._reader = BackgroundReader(run, REQUEST, self._received)

    def take(self) -> dict[str, Any] | None:
        """Return the request that arrived since the last call, None without one. Does not wait for storage."""
        self._reader.look()
        request, self._new = self._new, {}
        return request or None

    def close(self) -> None:
        """Stop reading."""
        self._reader.close(WAITS)

    def _received(self, request: dict[str, Any]) -> None:
        is_first, self._is_first_read = self._is_first_read, False
        if request.get("id") in (None, self._last_id) or not isinstance(request.get("ranks"), list):
            return
        self._last_id = str(request["id"])
        if not is_first and isinstance(request.get("steps"), int):
            self._new = request

"""Requests to profile the ranks of a run that trains: the command leaves them in the run directory, wherever it is."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.run_directory import RunDir

REQUEST = "profiles/request.json"
"""The last request: {"id", "ranks", "steps"}. Its results are in the folder beside it that has its id."""
EVERY, EVERY_REMOTE = 1.0, 5.0
"""Seconds between looks, on a local file system and at an object store."""
WAITS = 30.0
"""Seconds that the end of a run waits at most for a look at storage that does not answer."""


class ProfileRequests:
    """Looks for requests in a thread of its own; each is given once."""

    def __init__(self, run: RunDir) -> None:
        """A request that is there already is old: whoever made it asked another controller."""
        self._run, self._every = run, EVERY if run.local else EVERY_REMOTE
        self._seen, self._new = "", dict[str, Any]()
        self._first, self._looked = True, 0.0
        self._thread = BackgroundWriter(self._look)

    def take(self) -> dict[str, Any] | None:
        """What was asked for since the last call, None without anything. Returns soon."""
        if time.monotonic() - self._looked >= self._every:
            self._looked = time.monotonic()
            self._thread.request()
        asked, self._new = self._new, {}
        return asked or None

    def close(self) -> None:
        """Look no more."""
        self._thread.close(WAITS)

    def _look(self) -> None:
        try:
            found = self._run.read_json_or_empty(REQUEST)
        except Exception:  # whatever a store raises: the next look may be answered
            return
        first, self._first = self._first, False
        if found.get("id") in (None, self._seen) or not isinstance(found.get("ranks"), list):
            return
        self._seen = str(found["id"])
        if not first and isinstance(found.get("steps"), int):
            self._new = found

"""Checkpoints that could not be saved, and when that ends a run."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.controller.state import Stop


class SaveFailures:
    """Follows the outcome of every save. Stops a run whose saves have failed for `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._failing_since: float | None = None
        """The monotonic time of the first failure in a row; None while saves succeed."""
        self._last_failure = ""
        """The reason of the last failure."""
        self._remark: str | None = None
        """The problem that the last successful save reported."""

    def note(self, outcome: dict[str, Any]) -> str:
        """Return the line to report for a save that ended; empty for a success that follows a success."""
        step, reason = outcome["step"], outcome["reason"]
        if outcome["state"] == "failed":
            if self._failing_since is None:
                self._failing_since = time.monotonic()
            self._last_failure = reason
            return f"the save at step {step} failed: {reason}"
        resumes = self._failing_since is not None
        self._failing_since = None
        # A commit may succeed although old commits could not be removed. That is reported when it begins.
        is_new_remark = reason and not self._remark
        self._remark = reason
        if resumes:
            return f"saving resumes with the commit at step {step}"
        return f"after the commit at step {step} {reason}" if is_new_remark else ""

    def stop(self) -> Stop | None:
        """Return the stop of a run whose saves have failed for longer than the job allows; None before that."""
        now = time.monotonic()
        failing = now - (self._failing_since if self._failing_since is not None else now)
        if failing < self._limit:
            return None
        text = f"limits.unsaved is reached: every save has failed for {failing:.0f} s, the last one: "
        return Stop(kind="limit", text=text + self._last_failure)

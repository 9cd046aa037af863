"""How long all saves of a run have failed."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.controller.state import Stop


class SaveFailures:
    """Sees the outcome of every save. A run whose saves fail for longer than `limit` seconds is to stop."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._failing: tuple[float, str] | None = None  # since when, and why the last one did
        self._remark: str | None = None

    def note(self, outcome: dict[str, Any]) -> str:
        """What is to be told of a save that has ended; empty for one that went well, as the ones before."""
        if outcome["state"] == "failed":
            self._failing = (self._failing[0] if self._failing else time.monotonic(), outcome["reason"])
            return f"the save at step {outcome['step']} failed: {outcome['reason']}"
        message = f"saving resumes with the commit at step {outcome['step']}" if self._failing else ""
        self._failing = None
        # The commit stands, and yet: old commits could not be removed. Told when it begins.
        begins, self._remark = outcome["reason"] and not self._remark, outcome["reason"]
        return message or (f"after the commit at step {outcome['step']} {self._remark}" if begins else "")

    def stop(self) -> Stop | None:
        """The stop of a run whose saves have failed for as long as the job allows; None before."""
        now = time.monotonic()
        since, why = self._failing or (now, "")
        if now - since < self._limit:
            return None
        text = (
            f"limits.unsaved is reached: every save has failed for {now - since:.0f} s, the last one: {why}"
        )
        return Stop("limit", text)

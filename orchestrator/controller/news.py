"""Lines about a part of a run, kept until its controller can write them as events."""

from __future__ import annotations

from orchestrator.controller.decide import BEGINS
from orchestrator.controller.state import Phase


class News:
    """What happened since the controller last asked, a line each."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Keep a line that a user should know."""
        self._lines.append(line)

    def take(self, phase: Phase) -> list[str]:
        """Return the lines since the last call.

        Returns nothing in phases other than BEGINS, where an event would look like the begin of the phase.
        """
        if phase not in BEGINS:
            return []
        lines = self._lines
        self._lines = []
        return lines

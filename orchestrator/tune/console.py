"""What a search shows while it goes on, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from orchestrator.track.console import duration

LINE_SECONDS = 10.0


class SearchDisplay:
    """A plain line when a trial ends, and every ten seconds; on a terminal it is written over."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._told: Any = None
        self._spoke = -LINE_SECONDS
        self._terminal = self._stream.isatty()

    def __enter__(self) -> SearchDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._told is not None:
            print(file=self._stream)

    def update(self, standing: Mapping[str, Any]) -> None:
        """Show where the search stands, as `SearchProgress.to_json` says it."""
        told = (standing.get("ended"), standing.get("note"))
        if not self._terminal and told == self._told and time.monotonic() - self._spoke < LINE_SECONDS:
            return
        self._told, self._spoke = told, time.monotonic()
        text = line(standing)
        print(
            f"\r\x1b[2K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=self._stream,
        )
        self._stream.flush()


def line(standing: Mapping[str, Any]) -> str:
    """One line of it."""
    if standing.get("note"):
        return str(standing["note"])
    parts = [f"{standing['ended']} of {standing['trials']} trials ended"]
    if standing["failed"]:
        parts[0] += f" ({standing['failed']} failed)"
    if standing["at_work"]:
        parts.append(f"{len(standing['at_work'])} at work")
    if best := standing["best"]:
        parts.append(f"best {best['value']:.4f} ({best['trial']}, step {best['step']})")
    parts.append(f"{standing['steps']} steps")
    if standing["eta_seconds"]:
        parts.append(f"at most {duration(standing['eta_seconds'])} left")
    return "  ".join(parts)

"""Show the progress of a search on standard error while it runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from orchestrator.observe.formatting import duration

LINE_SECONDS = 10.0
"""Seconds between two lines without news, where there is no terminal."""


class SearchDisplay:
    """One line about the search. On a terminal it is updated in place; elsewhere it is printed again now and then."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last_news: Any = None
        self._printed_at = -LINE_SECONDS
        self._terminal = self._stream.isatty()

    def __enter__(self) -> SearchDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._last_news is not None:
            print(file=self._stream)

    def update(self, progress: Mapping[str, Any]) -> None:
        """Show the state of the search, as `SearchProgress.to_json` returns it, or a warning, which stays."""
        if warning := progress.get("warning"):
            with contextlib.suppress(BrokenPipeError):
                print(f"orchestrator: {warning}", file=self._stream, flush=True)
            return
        news = (progress.get("ended"), progress.get("note"))
        recent = time.monotonic() - self._printed_at < LINE_SECONDS
        if not self._terminal and news == self._last_news and recent:
            return
        self._last_news = news
        self._printed_at = time.monotonic()
        text = line(progress)
        with contextlib.suppress(BrokenPipeError):  # the reader has gone; the search continues
            print(
                f"\r\x1b[2K{text}" if self._terminal else text,
                end="" if self._terminal else "\n",
                file=self._stream,
                flush=True,
            )


def line(progress: Mapping[str, Any]) -> str:
    """Return the state of a search in one line, or the note about what it waits for."""
    if progress.get("note"):
        return str(progress["note"])
    parts = [f"{progress['ended']} of {progress['trials']} trials ended"]
    if progress["failed"]:
        parts[0] += f" ({progress['failed']} failed)"
    if progress["running"]:
        parts.append(f"{len(progress['running'])} running{'' if progress['steps'] else ', at their start'}")
    if best := progress["best"]:
        parts.append(f"best {best['value']:.4f} ({best['trial']}, step {best['step']})")
    parts.append(f"{progress['steps']} steps")
    if progress["eta_seconds"]:
        parts.append(f"at most {duration(progress['eta_seconds'])} left")
    return "  ".join(parts)

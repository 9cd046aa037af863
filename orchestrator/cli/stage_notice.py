"""Say on the terminal what a command is doing when that takes long."""

from __future__ import annotations

import sys
from threading import Timer
from types import TracebackType
from typing import IO

AFTER = 1.5
"""Seconds after which a stage is named."""


class StageNotice:
    """Prints a line on standard error for each stage of a command that takes longer than AFTER seconds.

    It prints on a terminal only, so that neither logs nor scripts get the lines.
    """

    def __init__(self, as_json: bool, stream: IO[str] | None = None, after: float = AFTER) -> None:
        """`as_json` switches it off. `stream` is standard error by default, `after` the seconds before a line."""
        self._stream = stream or sys.stderr
        self._is_shown = not as_json and self._stream.isatty()
        self._after = after
        self._timer: Timer | None = None

    def __enter__(self) -> StageNotice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def begin(self, stage: str) -> None:
        """Begin a stage, such as "reading the data", and end the one before it."""
        self._end()
        if self._is_shown:
            self._timer = Timer(self._after, self._print, [stage])
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _print(self, stage: str) -> None:
        print(f"orchestrator: {stage} ...", file=self._stream, flush=True)

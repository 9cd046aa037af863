"""The progress of a preparation: parts of a stage, their rate, and the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """The interface of a progress callback."""

    def __call__(self, stage: str, done: int, total: int, text_bytes: int = 0) -> None:
        """`done` of `total` parts are finished. All parts together hold `text_bytes` of text, 0 if unknown."""


class StageLine:
    """Passes a line of text to `tell` at each call: the parts, MB/s, and the remaining time at this stage's rate so
    far.

    Parts from an earlier run count as done, but not for the rate.
    """

    def __init__(self, tell: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._now = now
        self._stage = ""
        self._began = 0.0
        self._before = 0

    def __call__(self, stage: str, done: int, total: int, text_bytes: int = 0) -> None:
        """See `Progress`."""
        if stage != self._stage or done < self._before:
            self._stage = stage
            self._began = self._now()
            self._before = done
        words = [f"{stage}: {done} of {total} parts"]
        made = done - self._before
        seconds = self._now() - self._began
        if made and seconds > 0:
            if text_bytes:
                words.append(f"{text_bytes * made / total / seconds / 1e6:.1f} MB/s")
            if done < total:
                words.append(f"{(total - done) * seconds / made:.0f} s left")
        self._tell(", ".join(words))


def silent(stage: str, done: int, total: int, text_bytes: int = 0) -> None:
    """A progress callback that does nothing."""

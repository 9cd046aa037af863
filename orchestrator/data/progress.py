"""How far a preparation is: parts of a stage, how fast they are made, and how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """What is called as a stage goes on."""

    def __call__(self, stage: str, done: int, total: int, text_bytes: int = 0) -> None:
        """So many parts of `total` are done; all of them together hold `text_bytes` of text, 0 if that is unknown."""


class StageLine:
    """A line of text for each call: the parts, MB/s, and the time that is left at the rate of this stage so far.

    Parts that were done before count as done, and not for the rate. `tell` gets the line.
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
            self._stage, self._began, self._before = stage, self._now(), done
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
    """Progress that nobody follows."""

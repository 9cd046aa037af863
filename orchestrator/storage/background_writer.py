"""Writing beside: storage may be slow, or silent for as long as a call to it may take, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MOMENT = 0.1
"""Seconds that storage is waited for by who has asked it to be written to: on a disk that is all it takes."""


class Writer:
    """Has one function called in a thread of its own, again and again, and never twice at once."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._calls: list[Future[None]] = []  # one under way, and at most one that waits for it

    def ask(self) -> None:
        """Have it called after now; wait for that a moment. Raises what an earlier call raised, or this one."""
        if not self._calls or self._calls[-1].running() or self._calls[-1].done():
            self._calls.append(self._pool.submit(self._write))
        self.wait(MOMENT)

    def wait(self, seconds: float) -> bool:
        """Wait until it is not called any more, at most so long. Whether that is so. Raises what a call raised."""
        wait(self._calls, timeout=seconds)
        while self._calls and self._calls[0].done():
            self._calls.pop(0).result()
        return not self._calls

    def close(self, seconds: float) -> None:
        """Wait for what was asked for, at most so long; there will be no other call."""
        wait(self._calls, timeout=seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)

"""Writing to storage in a background thread, so that slow or unresponsive storage blocks nobody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MOMENT = 0.1
"""Seconds that a request waits for its write: on a local disk the write is done by then."""


class BackgroundWriter:
    """Calls one function in a thread of its own whenever that is requested, one call at a time."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._calls: list[Future[None]] = []  # the running one, and at most one that is queued

    def request(self) -> None:
        """Have the function called after now, and wait MOMENT for it. Raises what a finished call
        raised."""
        if not self._calls or self._calls[-1].running() or self._calls[-1].done():
            self._calls.append(self._pool.submit(self._write))
        self.wait(MOMENT)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long until no call is running or queued; returns whether that is so. Raises what a call
        raised."""
        wait(self._calls, timeout=seconds)
        while self._calls and self._calls[0].done():
            self._calls.pop(0).result()
        return not self._calls

    def close(self, seconds: float) -> None:
        """Wait at most so long for the calls under way; there will be no other."""
        wait(self._calls, timeout=seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)

"""Writing to storage in a background thread, so that slow or unresponsive storage blocks nobody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MOMENT = 0.1
"""Seconds that a request waits for its write. On a local disk, the write has usually finished by then."""


class BackgroundWriter:
    """Calls one function in a separate thread on request, one call at a time."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._calls: list[Future[None]] = []  # the running call, and at most one that is queued

    def request(self) -> None:
        """Request a call that starts after now, and wait MOMENT for it. Raises the error of a finished call."""
        if not self._calls or self._calls[-1].running() or self._calls[-1].done():
            self._calls.append(self._pool.submit(self._write))
        self.wait(MOMENT)

    def wait(self, seconds: float) -> bool:
        """Wait up to this many seconds until no call is running or queued; return whether that is so. Raises the
        error of a call.
        """
        wait(self._calls, timeout=seconds)
        while self._calls and self._calls[0].done():
            self._calls.pop(0).result()
        return not self._calls

    def close(self, seconds: float) -> None:
        """Wait up to this many seconds for the current calls. No calls are accepted afterwards."""
        wait(self._calls, timeout=seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)

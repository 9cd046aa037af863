"""What a controller does and prints, in the run directory: `logs/controller/<when it began>.log`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from cluster.workers.rank_output import FLUSH_TIMEOUT, MOST_BYTES, RankOutput, StampedStream
from orchestrator.config.outcome import Outcome
from orchestrator.observe.rank_log import output_of_controller

LOGGER = "orchestrator"
"""The logger whose messages are kept: those of the tasks that prepare data among them."""


class ControllerLog:
    """Lines with time and step, kept in memory until `keep` says that the run is one that can run: what is found wrong
    before leaves no file behind."""

    def __init__(self, run: str) -> None:
        """Of the run at that URI. `step` is the number that lines have, none if it is 0."""
        self._run, self.step = run, 0
        self._output: RankOutput | None = None
        self._stream: StampedStream | None = None
        self._file, self._closed, self._lock = -1, False, threading.RLock()
        self._handler = LogHandler(self.write)

    def keep(self) -> None:
        """From now on there is a file."""
        with self._lock:
            if self._output is not None or self._closed:
                return
            self._open()
            target, name = output_of_controller(self._run)
            self._output = RankOutput(name, target)
            copied = os.open(self._output.path, os.O_WRONLY | os.O_APPEND)
            os.write(copied, os.pread(self._file, MOST_BYTES, 0))
            os.dup2(copied, self._file)
            os.close(copied)
            logging.getLogger(LOGGER).setLevel(logging.INFO)
            logging.getLogger(LOGGER).addHandler(self._handler)

    def write(self, text: str) -> None:
        """Add a text of whole lines, or part of one."""
        with self._lock:
            if not self._closed:
                self._open().write(text)

    def _open(self) -> StampedStream:
        if self._stream is None:
            self._file = os.memfd_create("controller")
            self._stream = StampedStream(self._file, lambda: self.step)
        return self._stream

    def event(self, step: int, phase: str, reason: str) -> None:
        """Add a line for an event of the run; a run that has failed keeps the log in any case."""
        self.step = step
        self.write(f"{phase}: {reason}\n")
        if phase == Outcome.FAILED:
            self.keep()

    def capture(self) -> None:
        """Have all that this process prints from now on; it goes where it went before too."""
        sys.stdout, sys.stderr = Tee(sys.stdout, self.write), Tee(sys.stderr, self.write)

    def close(self) -> None:
        """Copy the rest, for some seconds at most."""
        with self._lock:
            self._closed = True
            logging.getLogger(LOGGER).removeHandler(self._handler)
            if self._stream is not None:
                self._stream.flush()
                os.close(self._file)
                self._stream = None
        if self._output is not None:
            self._output.close()
            self._output.join(FLUSH_TIMEOUT)


class LogHandler(logging.Handler):
    """Hands on the text of each message."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._write(f"{record.getMessage()}\n")


class Tee(io.TextIOBase):
    """A stream whose text goes to two places; the second never fails the first."""

    def __init__(self, stream: IO[str], write: Callable[[str], None]) -> None:
        self._first, self._second = stream, write

    encoding = "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)  # such as `buffer`

    def writable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def fileno(self) -> int:
        """See `io.IOBase`."""
        return self._first.fileno()

    def isatty(self) -> bool:
        """See `io.IOBase`."""
        return self._first.isatty()

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        with contextlib.suppress(Exception):
            self._second(text)
        return self._first.write(text)

    def flush(self) -> None:
        """See `io.IOBase`."""
        self._first.flush()

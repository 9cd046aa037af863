"""The log of a controller in the run directory, with its events and output: `logs/controller/<when it began>.log`."""

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
"""The logger whose messages are kept, including those of the tasks that prepare data."""


class ControllerLog:
    """Lines with time and step. They stay in memory until `keep`, so a job that is refused leaves no file behind.

    Attributes:
        step: the step that lines show; they show none if it is 0.
    """

    def __init__(self, run: str) -> None:
        """`run` is the URI of the run directory."""
        self._run = run
        self.step = 0
        self._output: RankOutput | None = None
        """Copies the log to the run directory; None before `keep`."""
        self._stream: StampedStream | None = None
        """Stamps lines and writes them to the file in memory."""
        self._file = -1
        """The file in memory, or its copy after `keep`."""
        self._closed = False
        self._lock = threading.RLock()
        self._handler = LogHandler(self.write)

    def keep(self) -> None:
        """Write the log to the run directory from now on, including all lines so far."""
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
        """Add text, which may be whole lines or a part of one."""
        with self._lock:
            if not self._closed:
                self._open().write(text)

    def _open(self) -> StampedStream:
        if self._stream is None:
            self._file = os.memfd_create("controller")
            self._stream = StampedStream(self._file, lambda: self.step)
        return self._stream

    def event(self, step: int, phase: str, reason: str) -> None:
        """Add a line for an event of the run. The log of a failed run is kept in any case."""
        self.step = step
        self.write(f"{phase}: {reason}\n")
        if phase == Outcome.FAILED:
            self.keep()

    def capture(self) -> None:
        """Also log everything that this process prints from now on."""
        sys.stdout, sys.stderr = Tee(sys.stdout, self.write), Tee(sys.stderr, self.write)

    def close(self) -> None:
        """Copy the rest to the run directory, within some seconds, and end the log."""
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
    """Passes the text of each message on."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._write(f"{record.getMessage()}\n")


class Tee(io.TextIOBase):
    """A stream that also passes its text on to a function, whose errors are ignored."""

    def __init__(self, stream: IO[str], write: Callable[[str], None]) -> None:
        self._first = stream
        self._second = write

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

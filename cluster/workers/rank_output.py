"""What ranks print: kept in memory of their node, and copied from there to where the run keeps it.

A rank's standard output and error are one file in memory. It outlives the rank, so that a traceback of a process that
died is not lost; writing to it never waits for storage and never fills a disk. A thread of the process that started the
rank copies what is new, and frees what is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.workers.worker_context import WorkerContext

INTERVAL = 1.0
"""Seconds between copies."""
FLUSH_TIMEOUT = 3.0
"""Seconds for the last copy, when workers end."""
TAIL_BYTES = 1 << 14
"""Bytes at the end that stay in memory, to be shown when the rank fails."""
MOST_BYTES = 64 << 20
"""Bytes in memory beyond which a rank prints nothing more until they are copied."""
LINE_BYTES = 1 << 13
"""A longer line is written in pieces."""
TRACE = signal.SIGUSR1
"""The signal at which a rank prints the Python stacks of its threads, also from within a call of a C library."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class Writer(Protocol):
    """Where output is copied to."""

    def append(self, data: bytes) -> None:
        """Add to the end. Whatever it raises, the same bytes are given again later."""


@dataclass(frozen=True)
class OutputTarget:
    """Where what ranks print is kept: a `Writer`, made as `writer` ("module:Class") of `folder` and a file's name."""

    writer: str
    folder: str

    def open(self, name: str) -> Writer:
        """The writer of the file `name`."""
        module, _, found = self.writer.partition(":")
        made: Writer = getattr(importlib.import_module(module), found)(self.folder, name)
        return made


class RankOutput:
    """What one rank prints, as seen by the process that starts it. The rank is given `path`."""

    def __init__(self, name: str, target: OutputTarget | None) -> None:
        """It is copied to the file `name`, as that of `log_of`. Without a `target` nothing is copied, and the last
        lines alone are kept."""
        self._file = os.memfd_create(name)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._name, self._target = name, target
        self._writer: Writer | None = None
        self._copied, self._last = 0, b""
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._copy, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last of what it printed, at most TAIL_BYTES of it."""
        with self._lock:
            return (self._last if self._file < 0 else self._end()).decode(errors="replace")

    def close(self) -> None:
        """Have the rest copied and end; returns at once. The rank has ended."""
        self._ends.set()

    def join(self, timeout: float) -> None:
        """Wait for the end, after `close`."""
        self._thread.join(timeout)

    def _copy(self) -> None:
        last = False
        while not last:
            last = self._ends.wait(INTERVAL)  # whatever is printed before the end is copied
            with contextlib.suppress(Exception):  # storage that fails now may answer the next time
                self._copy_new()
        with self._lock:
            self._last = self._end()
            os.close(self._file)
            self._file = -1

    def _end(self) -> bytes:
        size = os.fstat(self._file).st_size
        return os.pread(self._file, TAIL_BYTES, max(size - TAIL_BYTES, 0))

    def _copy_new(self) -> None:
        while data := os.pread(self._file, 1 << 20, self._copied):
            if self._target is not None:
                self._writer = self._writer or self._target.open(self._name)
                self._writer.append(data)
            self._copied += len(data)
            _free(self._file, self._copied - TAIL_BYTES)


def log_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.log"


def _free(file: int, upto: int) -> None:
    """Give back the memory of a file up to that byte."""
    if upto > 0:
        libc = ctypes.CDLL(None)
        libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(upto))


def redirect(path: str, context: WorkerContext) -> None:
    """Have this process, a rank, print to the file `path`: each line with the time and the number of the step that it
    works on. A fatal signal prints the Python stack, and TRACE those of all threads. Where the file cannot be opened,
    it goes on printing to where the process did that started it."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (StampedStream(number, lambda: context.step + 1) for number in (1, 2))
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(TRACE, file=2, all_threads=True)


class StampedStream(io.TextIOBase):
    """Writes whole lines to a file descriptor, each with the time and, unless it is 0, the number of the step. Printing
    never fails: what cannot be written is lost."""

    def __init__(self, file: int, step: Callable[[], int]) -> None:
        self._file, self._step = file, step
        self._held, self._lock = "", threading.RLock()

    encoding = "utf-8"

    def writable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def fileno(self) -> int:
        """See `io.IOBase`."""
        return self._file

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
            if len(self._held) > LINE_BYTES:
                lines, self._held = [*lines, self._held], ""
            self._print(lines)
        return len(text)

    def flush(self) -> None:
        """See `io.IOBase`; the part of a line that was held back becomes a line."""
        with self._lock:
            lines, self._held = [self._held] if self._held else [], ""
            self._print(lines)

    def _print(self, lines: list[str]) -> None:
        if not lines:
            return
        now = time.time()
        at = f"{time.strftime('%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}"
        stamp = f"{at} step {step}: " if (step := self._step()) else f"{at}: "
        # A line that is drawn again and again, as of a progress bar, is shown as it was last.
        shown = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines)
        data = "".join(f"{stamp}{line}\n" for line in shown).encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_blocks * 512 < MOST_BYTES:
                os.write(self._file, data)


def last_lines(text: str, most: int = 20) -> list[str]:
    """The last whole lines of a text."""
    return [line for line in text.splitlines() if line.strip()][-most:]

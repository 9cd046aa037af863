"""The output of ranks: kept in memory on their node, and copied from there to the run directory.

A rank's standard output and error go to one file in memory. The file outlives the rank, so the traceback of a process
that died is not lost. Writing to it never waits for storage and never fills a disk. A thread of the process that
started the rank copies new output and frees the memory of what is copied.
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
"""The bytes at the end that stay in memory, to show when the rank fails."""
MOST_BYTES = 64 << 20
"""The limit on uncopied output in memory, in bytes. A rank prints nothing more until some is copied."""
LINE_BYTES = 1 << 13
"""A line with more bytes is written in pieces."""
TRACE = signal.SIGUSR1
"""The signal that makes a rank print the Python stacks of its threads, even from within a call of a C library."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class Writer(Protocol):
    """The destination of output."""

    def append(self, data: bytes) -> None:
        """Append data. After an error the same bytes are passed again later."""


@dataclass(frozen=True)
class OutputTarget:
    """The destination of the ranks' output: a class `writer` ("module:Class"), made with `folder` and a file's name."""

    writer: str
    folder: str

    def open(self, name: str) -> Writer:
        """Return the writer of the file `name`."""
        module, _, class_name = self.writer.partition(":")
        writer: Writer = getattr(importlib.import_module(module), class_name)(self.folder, name)
        return writer


class RankOutput:
    """The output of one rank, in the process that starts it. The rank prints to the file `path`."""

    def __init__(self, name: str, target: OutputTarget | None) -> None:
        """Start to copy output.

        Args:
            name: the name of the file to copy to, such as `log_of` returns.
            target: the destination. None copies nothing and keeps only the last lines.
        """
        self._file = os.memfd_create(name)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._name = name
        self._target = target
        self._writer: Writer | None = None
        self._copied = 0
        """How many bytes are copied."""
        self._last = b""
        """The last output, once the file is closed."""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        """Set when the rank has ended."""
        self._thread = threading.Thread(target=self._copy, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """Return the last TAIL_BYTES of the output."""
        with self._lock:
            return (self._last if self._file < 0 else self._end()).decode(errors="replace")

    def close(self) -> None:
        """Copy the rest in the background. Call it after the rank has ended; it returns at once."""
        self._ends.set()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until the rest is copied, after `close`."""
        self._thread.join(timeout)

    def _copy(self) -> None:
        last = False
        while not last:
            last = self._ends.wait(INTERVAL)  # the last pass copies all output before the end
            with contextlib.suppress(Exception):  # the next pass tries again after an error
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
            # The file keeps its size and its offsets; only its pages are given back. What `tail` shows stays.
            _free(self._file, self._copied - TAIL_BYTES)


def log_of(rank: int) -> str:
    """Return the name of a rank's log file."""
    return f"rank-{rank}.log"


def _free(file: int, upto: int) -> None:
    """Free the memory of a file up to a byte."""
    if upto > 0:
        libc = ctypes.CDLL(None)
        # `os.posix_fallocate` cannot punch holes. Without c_int64, ctypes passes off_t as a C int of 32 bits.
        libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(upto))


def redirect(path: str, context: WorkerContext) -> None:
    """Redirect the output of this rank's process to a file. Each line gets the time and the number of the present step.

    A fatal signal prints the Python stack, and TRACE prints the stacks of all threads. If the file cannot be opened,
    the process keeps the output of its parent.

    Args:
        path: the file.
        context: says which step the rank is at.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        # On the descriptors, so that what C libraries such as NCCL print goes there too.
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (StampedStream(number, lambda: context.step + 1) for number in (1, 2))
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(TRACE, file=2, all_threads=True)


class StampedStream(io.TextIOBase):
    """Writes whole lines to a file descriptor, each with the time and the number of the step, unless that is 0.

    Printing never fails. Output that cannot be written is lost.
    """

    def __init__(self, file: int, step: Callable[[], int]) -> None:
        self._file = file
        self._step = step
        self._partial_line = ""
        """The beginning of an unfinished line."""
        self._lock = threading.RLock()

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
            *lines, self._partial_line = (self._partial_line + text).split("\n")
            if len(self._partial_line) > LINE_BYTES:
                lines.append(self._partial_line)
                self._partial_line = ""
            self._print(lines)
        return len(text)

    def flush(self) -> None:
        """See `io.IOBase`. An unfinished line becomes a line."""
        with self._lock:
            lines, self._partial_line = [self._partial_line] if self._partial_line else [], ""
            self._print(lines)

    def _print(self, lines: list[str]) -> None:
        if not lines:
            return
        now = time.time()
        at = f"{time.strftime('%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}"
        stamp = f"{at} step {step}: " if (step := self._step()) else f"{at}: "
        # A progress bar redraws its line. Only the last version is written.
        shown = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines)
        data = "".join(f"{stamp}{line}\n" for line in shown).encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            # Blocks, not the size: what `_free` has given back counts no more.
            if os.fstat(self._file).st_blocks * 512 < MOST_BYTES:
                os.write(self._file, data)


def last_lines(text: str, max_lines: int = 20) -> list[str]:
    """Return the last non-empty lines of a text.

    Args:
        text: the output.
        max_lines: lines at most.
    """
    return [line for line in text.splitlines() if line.strip()][-max_lines:]

"""JSON lines over pipes."""

from __future__ import annotations

import json
import os
from typing import Any

CHUNK = 1 << 16


class Lines:
    """Read JSON objects, one per line, from a file descriptor."""

    def __init__(self, source: int, longest: int | None = None) -> None:
        """
        Args:
            source: the file descriptor.
            longest: bytes after which an unfinished line is dropped; None for lines of any length.
        """
        self.source = source
        self._longest = longest
        self._read = bytearray()
        self._searched = 0

    def fileno(self) -> int:
        return self.source

    def take(self) -> dict[str, Any] | None:
        """Return the next line that has been read completely, or None if no line is complete.

        Raises ValueError if it is no JSON.
        """
        end = self._read.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._read)
            return None
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        self._searched = 0
        return dict(json.loads(line))

    def fill(self) -> bool:
        """Read what is there, or wait for something. Returns False at the end of the file."""
        try:
            chunk = os.read(self.source, CHUNK)
        except BlockingIOError:
            return True
        self._read += chunk
        if self._longest is not None and self._searched > self._longest:
            self._read.clear()
            self._searched = 0
        return bool(chunk)

    def wait(self) -> dict[str, Any] | None:
        """Wait for the next line and return it; None at the end of the file."""
        while True:
            if (line := self.take()) is not None:
                return line
            if not self.fill():
                return None


def line_of(message: dict[str, Any]) -> bytes:
    """Return a message as one line. Arrays are sent as lists, and what JSON does not know as text."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write(target: int, data: bytes) -> None:
    """Write all of `data` to a blocking file descriptor.

    Args:
        target: the file descriptor.
        data: what to write.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]

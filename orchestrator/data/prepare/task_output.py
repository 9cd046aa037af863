"""What tasks print in their processes, on whatever node: it comes back with their results and is logged here."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import IO, Any

MOST = 1 << 14
"""Characters of a task that come back, the first of them."""
LOGGER = logging.getLogger("orchestrator.data")


class Copy(io.TextIOBase):
    """A stream whose text goes on to `stream`, and its first MOST characters to `text`."""

    def __init__(self, stream: IO[str], text: io.StringIO) -> None:
        self._stream, self._text = stream, text

    encoding = "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # such as `buffer`

    def writable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        self._text.write(text[: max(MOST - self._text.tell(), 0)])
        return self._stream.write(text)

    def flush(self) -> None:
        """See `io.IOBase`."""
        self._stream.flush()


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """Have what is printed in this context, warnings included; it is printed where it was before too."""
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(Copy(sys.stdout, text)),
        contextlib.redirect_stderr(Copy(sys.stderr, text)),
    ):
        yield text


def log_printed(task: str, text: str) -> None:
    """Log what a task has printed, a message a line."""
    for line in text.splitlines():
        if line.strip():
            LOGGER.info("data, %s: %s", task, line)

"""A lock file that one process holds at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Create and lock the file at `path`, and remove it at the end. The kernel releases the lock when the process ends.

    Raises BlockingIOError at once if another process holds it.
    """
    while (fd := _lock(path)) is None:
        pass  # its owner removed it just as it was opened
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _lock(path: Path) -> int | None:
    """The descriptor of the locked file; None if the file was removed meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None

"""One command at a time: who starts a cluster under a name ends what is left under that name first."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the file at `path`, which is made, and removed at the end; the hold ends with the process, however that
    ends. Raises BlockingIOError at once if another process holds it."""
    while (fd := _held(path)) is None:
        pass  # its holder removed it just as it was opened
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _held(path: Path) -> int | None:
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

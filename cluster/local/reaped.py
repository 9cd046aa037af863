"""A process whose Ray does not outlive it, however it ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

from cluster.local import reaper


@contextlib.contextmanager
def reaped() -> Iterator[None]:
    """Run `reaper.py` beside this process, so that no process of the Ray started within this context outlives it for
    long, however it ends."""
    if not sys.platform.startswith("linux"):
        yield
        return
    marker = secrets.token_hex(16)
    arguments = [sys.executable, "-I", "-S", reaper.__file__, marker]
    # A session of its own: what interrupts or ends this process's group must not end the reaper too.
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.environ[reaper.VARIABLE] = marker
    try:
        yield
    finally:
        os.environ.pop(reaper.VARIABLE, None)
        with contextlib.suppress(OSError):
            process.communicate(b".")

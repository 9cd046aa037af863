"""A process whose Ray does not outlive it, however it ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

from cluster.local import reaper

WAIT = 15.0
"""Seconds for the reaper to end what is left; it goes on alone after that."""


@contextlib.contextmanager
def reaped(folder: str = "") -> Iterator[None]:
    """Run `reaper.py` beside this process, so that no process of the Ray started within this context outlives it for
    long, however it ends; nor its `folder`, if this process is killed."""
    if not sys.platform.startswith("linux"):
        yield
        return
    marker = secrets.token_hex(16)
    arguments = [sys.executable, "-I", "-S", reaper.__file__, marker, str(os.getpid())]
    arguments += [folder] if folder else []
    # A session of its own: what interrupts or ends this process's group must not end the reaper too.
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.environ[reaper.VARIABLE] = marker
    in_order = False
    try:
        yield
        in_order = True
    finally:
        os.environ.pop(reaper.VARIABLE, None)
        # Without the byte it ends what is left: the agents of a Ray that was still starting live on for minutes.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(b"." if in_order else b"", timeout=WAIT)

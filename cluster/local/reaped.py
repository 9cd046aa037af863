"""Make sure that no Ray process outlives the process that started Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

from cluster.local import reaper

WAIT = 15.0
"""Seconds to wait for the reaper. It continues alone after that."""


@contextlib.contextmanager
def reaped(folder: str = "") -> Iterator[None]:
    """Run `reaper.py` beside this process for the length of the block.

    Ray processes that are started in the block end soon after this process, however it ends. If this process is killed,
    the reaper also removes `folder`.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    marker = secrets.token_hex(16)
    arguments = [sys.executable, "-I", "-S", reaper.__file__, marker, str(os.getpid())]
    arguments += [folder] if folder else []
    # In its own session, so that a signal to this process's group does not end the reaper.
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
        # Without the byte the reaper kills what is left, since the agents of a starting Ray live on for minutes.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(b"." if in_order else b"", timeout=WAIT)

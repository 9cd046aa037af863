"""A process forked ahead of the next attempt, which makes its device ready and waits for the rank that it is to run.

A GPU's context and libraries take each new process seconds, and none of them survives a fork.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

READINESS = "make_ready"
"""The function, without arguments, with which an entry point's module makes a device ready, if it has one."""
SETTLE = 10.0
"""Seconds that a standby leaves the processor and the driver to the rank that starts beside it."""
TAKE_TIMEOUT = 1.0
"""Seconds for a standby to take over a rank, which takes it milliseconds: it may be frozen."""


class Standby:
    """Forks a process that calls `make_ready`, `delay` seconds from now. `run` is then given a function that waits for
    a rank and returns it; it runs the rank, and does not return. `inherited` are the sockets that the process closes,
    since they are its parent's."""

    def __init__(
        self,
        make_ready: Callable[[], None],
        run: Callable[[Callable[[], dict[str, Any]]], None],
        inherited: list[socket.socket],
        delay: float = 0.0,
    ) -> None:
        self.channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            for end in (self.channel, *inherited):
                os.close(end.detach())
            run(lambda: _wait_for_rank(theirs, make_ready, delay))
        theirs.close()
        self.channel.settimeout(TAKE_TIMEOUT)

    def is_ready(self) -> bool:
        """Whether it has ended, or its device is ready; `take` tells which."""
        return bool(select.select([self.channel], [], [], 0)[0])

    def take(self, rank: dict[str, Any]) -> bool:
        """Have it run the rank; False if it has ended or does not answer, and is of no use."""
        with self.channel as channel:
            try:
                if not channel.recv(1):
                    return False
                channel.sendall(json.dumps(rank).encode() + b"\n")
                return bool(channel.recv(1))
            except OSError:
                return False


def _wait_for_rank(channel: socket.socket, make_ready: Callable[[], None], delay: float) -> dict[str, Any]:
    time.sleep(delay)
    make_ready()
    channel.sendall(b"r")
    with channel, channel.makefile("r") as lines:
        rank = lines.readline()
        if not rank.endswith("\n"):
            raise SystemExit  # nobody waits any longer
        channel.sendall(b"t")
    return dict(json.loads(rank))

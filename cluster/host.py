"""The process of one rank: it runs the entry point in a thread and answers for it.

The same host lives in a Ray actor and in a local child process. Training has a thread of its own, so that
heartbeats go on while it computes, and an entry point that raises is told rather than lost.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import threading
import time
import traceback
from typing import Any

from cluster.link import Link, Seat


class RankHost:
    """Runs one rank. Methods are called by the gang, one at a time, and return at once."""

    def __init__(self) -> None:
        self._store: Any = None
        self._link: Link | None = None
        self._state, self._error, self._failed_at, self._result = "starting", "", 0.0, None

    def open_store(self, host: str) -> int:
        """Serve a c10d TCPStore on a free port of `host`, and return the port.

        The socket is bound before anyone is told of it, so no other process can take the port in between.
        """
        from torch.distributed import TCPStore

        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def launch(self, seat: Seat, target: str, config: dict[str, Any]) -> None:
        """Run `target` ("module:function") as `function(config, link)` in a thread."""
        self._link = Link(seat, self._store)
        thread = threading.Thread(
            target=self._run, args=(target, config), name=f"rank-{seat.rank}", daemon=True
        )
        thread.start()

    def beat(self, start: int, saved: int) -> dict[str, Any]:
        """State, step and the rows from number `start` on; see `Gang.poll` for `saved`."""
        link = self._link
        # The state is read first: rows of a rank that is done are then certainly all there.
        answer = {
            "state": self._state,
            "error": self._error,
            "failed_at": self._failed_at,
            "result": self._result,
        }
        return {**answer, "step": link.step if link else -1, "rows": link.take(start, saved) if link else ()}

    def request_stop(self) -> None:
        """Ask the rank to commit and end at its next step boundary."""
        if self._link:
            self._link.request_stop()

    def _run(self, target: str, config: dict[str, Any]) -> None:
        module, _, function = target.partition(":")
        self._state = "running"
        try:
            self._result = getattr(importlib.import_module(module), function)(config, self._link)
            self._state = "done"
        except BaseException as error:  # whatever ends a rank is the gang's to know
            self._failed_at = time.time()
            self._error = describe(error)
            traceback.print_exc()
            self._state = "failed"


def describe(error: BaseException) -> str:
    """One line: what was raised, notes that were added to it, and the innermost place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text[:500]}{notes}{place}"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens (Linux)."""
    if os.name == "posix" and os.uname().sysname == "Linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Bind and keep it where you can; see `RankHost.open_store`."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

"""The process of one rank: it runs the entry point in its main thread, while another tells how it is.

Heartbeats go on while the rank computes, and an entry point that raises is told rather than lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.error_kind import cause_of
from cluster.workers.worker_context import RankInfo, WorkerContext

INTERVAL = 0.1
"""Seconds between heartbeats where there is no news."""
PAUSE = 0.02
"""Seconds between heartbeats at least."""
CONNECT_TIMEOUT = 20.0
"""Seconds to reach whoever watches."""
FENCE = 60.0
"""Seconds without a word of the watcher after which a rank ends itself: another may have taken its place."""


def run(seat: dict[str, Any], target: str, config: dict[str, Any], watcher: str, token: str) -> int:
    """Run `target` ("module:function") as `function(config, link)`, and tell `watcher` ("host:port") how it goes.

    Returns the exit code: 0 if the rank is done.
    """
    link = WorkerContext(RankInfo(**seat))
    signal.signal(signal.SIGTERM, lambda *_: link.leave())
    pulse = HeartbeatSender(link, watcher, token)
    module, _, function = target.partition(":")
    pulse.tell(state="running")
    try:
        if not link.seat.rank and not link.seat.port:
            link.store = serve_store(link.seat.host)
            pulse.tell(port=int(link.store.port))
        result = getattr(importlib.import_module(module), function)(config, link)
        pulse.end(state="done", result=result)
        return 0
    except BaseException as error:  # whatever ends a rank is the gang's to know
        failed_at = time.monotonic()
        with contextlib.suppress(Exception):  # the program may have closed what is printed to
            traceback.print_exc()
        pulse.end(
            state="failed",
            error=describe(error),
            cause=dataclasses.asdict(cause_of(error)),
            failed_at=failed_at,
        )
        return 1


class HeartbeatSender:
    """Tells the watcher how this rank is, every INTERVAL and at once when it ends."""

    def __init__(self, link: WorkerContext, watcher: str, token: str) -> None:
        self._link = link
        self._told: dict[str, Any] = {"state": "starting"}
        self._sent = 0
        self._ended = threading.Event()
        host, _, port = watcher.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), CONNECT_TIMEOUT)
        self._socket.settimeout(CONNECT_TIMEOUT)
        self._send({"token": token, "rank": link.seat.rank, "pid": os.getpid()})
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        threading.Thread(target=self._listen, name="ear", daemon=True).start()

    def tell(self, **fields: Any) -> None:
        """Add to what every beat says."""
        self._told = {**self._told, **fields}
        self._link.news.set()

    def end(self, **fields: Any) -> None:
        """The last word; returns when the watcher has it."""
        self.tell(**fields, ended=True)
        self._ended.wait(FENCE)

    def _beat(self) -> None:
        try:
            while not self._ended.wait(PAUSE):
                self._link.news.clear()
                told, link = (
                    self._told,
                    self._link,
                )  # the state first: a rank that is done has all its rows there
                rows = link.take(self._sent, 0)
                self._sent += len(rows)
                where = {"step": link.step, "waiting": link.is_waiting, "leaving": link.is_leaving}
                # Clocks of two hosts cannot be compared, but how long ago something was can be told.
                times = {"now": wall()}
                if "failed_at" in told:
                    times["failed_ago"] = time.monotonic() - told["failed_at"]
                self._send({**told, **where, **times, "rows": rows})
                if told.get("ended"):
                    return
                link.news.wait(INTERVAL)
        except OSError:
            os._exit(1)  # nobody watches any more

    def _listen(self) -> None:
        """What the watcher says; the process ends if it is gone or silent."""
        self._socket.settimeout(FENCE)
        try:
            for line in self._socket.makefile("r"):
                message = json.loads(line)
                self._link.take(0, message.get("saved", 0))
                if message.get("stop"):
                    self._link.request_stop()
                if "port" in message:
                    self._link.meet(message["port"])
                if message.get("bye"):
                    self._ended.set()
                    return
        except OSError:
            pass
        os._exit(1)

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def serve_store(host: str) -> Any:
    """A c10d TCPStore on a free port of `host`, and of no other address, since it believes whoever comes.

    The socket is bound before anyone is told of it, so no other process can take the port in between.
    """
    from torch.distributed import TCPStore

    bound = socket.create_server((host, 0), backlog=1024)
    port, descriptor = bound.getsockname()[1], bound.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def describe(error: BaseException) -> str:
    """One line: what was raised, notes that were added to it, and the innermost place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text[:500]}{notes}{place}"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, of that process id, dies, however that happens (Linux)."""
    if os.name == "posix" and os.uname().sysname == "Linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked

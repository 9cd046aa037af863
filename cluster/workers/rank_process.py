"""The process of one rank. Its main thread runs the entry point; other threads exchange messages with the gang.

Heartbeats go on while the rank computes. An exception of the entry point is reported before the process ends.
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
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.error_kind import cause_of
from cluster.workers.hang_report import HangReport
from cluster.workers.node_metrics import NodeMetrics
from cluster.workers.rank_output import redirect
from cluster.workers.worker_context import RankInfo, WorkerContext

INTERVAL = 0.1
"""The shortest time between heartbeats when nothing has changed, in seconds."""
LONGEST_INTERVAL = 1.0
"""The longest time between heartbeats when nothing has changed, in seconds."""
BEATS = 1000.0
"""Heartbeats that all ranks together send in a second. The two limits take precedence."""
MIN_INTERVAL = 0.02
"""The shortest time between two heartbeats, in seconds."""
CONNECT_TIMEOUT = 20.0
"""Seconds to connect to the heartbeat server, and to send it a message."""
READINGS = 10
"""The largest number of readings of the node that wait to be sent."""
LAST_READING = 0.2
"""Seconds that the end of a rank waits for the last reading, because a driver may not answer."""
FENCE_TIMEOUT = 60.0
"""Seconds without a message from the heartbeat server after which a rank ends itself: it may have been replaced."""


def run(
    rank_info: dict[str, Any], target: str, config: dict[str, Any], server: str, token: str, output: str = ""
) -> int:
    """Run the entry point as `function(config, context)`, and report to the heartbeat server.

    Args:
        rank_info: the fields of a `RankInfo`.
        target: the entry point, "module:function".
        config: its configuration.
        server: the heartbeat server, "host:port".
        token: authenticates the rank.
        output: the file to print to, see `rank_output.redirect`; empty to print where the parent process prints.

    Returns:
        The exit code: 0 if the entry point returned, 1 if it raised.
    """
    context = WorkerContext(RankInfo(**rank_info))
    if output:
        redirect(output, context)
    # A cluster that takes the node away sends SIGTERM and leaves time: the rank commits and ends by itself.
    signal.signal(signal.SIGTERM, lambda *_: context.notice_preemption())
    heartbeat = HeartbeatSender(context, server, token)
    module, _, function = target.partition(":")
    heartbeat.report(state="running")
    try:
        if not context.rank_info.rank and not context.rank_info.port:
            context.store = serve_store(context.rank_info.host)
            heartbeat.report(port=int(context.store.port))
        result = getattr(importlib.import_module(module), function)(config, context)
        heartbeat.finish(state="done", result=result)
        return 0
    except BaseException as error:  # every error is reported to the gang
        failed_at = time.monotonic()
        with contextlib.suppress(Exception):  # the program may have closed standard error
            traceback.print_exc()
        heartbeat.finish(
            state="failed",
            error=describe(error),
            cause=dataclasses.asdict(cause_of(error)),
            failed_at=failed_at,
        )
        return 1


class HeartbeatSender:
    """Sends this rank's state to the heartbeat server at intervals and at every change, and reads its messages.

    The process ends if the connection closes.
    """

    def __init__(self, context: WorkerContext, server: str, token: str) -> None:
        self._context = context
        self._fields: dict[str, Any] = {"state": "starting"}
        self._sent = 0
        self._hang: HangReport | None = None
        """The answer to the question what this rank waits for, until it is sent."""
        self._last: dict[str, Any] = {}
        """The fields as the server knows them."""
        self._readings: deque[dict[str, float]] = deque(maxlen=READINGS)
        self._ending = threading.Event()
        self._reader = threading.Thread(target=self._read_node, name="node-metrics", daemon=True)
        self._acknowledged = threading.Event()
        host, _, port = server.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), CONNECT_TIMEOUT)
        self._socket.settimeout(CONNECT_TIMEOUT)
        self._send({"token": token, "rank": context.rank_info.rank, "pid": os.getpid()})
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._read_messages, name="heartbeat-reader", daemon=True).start()
        if not context.rank_info.local_rank:  # one rank of each node reads its metrics
            self._reader.start()

    def report(self, **fields: Any) -> None:
        """Set fields of all further heartbeats."""
        self._fields = {**self._fields, **fields}
        self._context.changed.set()

    def finish(self, **fields: Any) -> None:
        """Send the last heartbeat, and wait until the server has acknowledged it."""
        if self._reader.is_alive():
            self._ending.set()
            self._reader.join(LAST_READING)
        self.report(**fields, ended=True)
        self._acknowledged.wait(FENCE_TIMEOUT)

    def _read_node(self) -> None:
        with contextlib.suppress(Exception):  # telemetry must not end a rank
            node = NodeMetrics()
            ending = False
            while not ending:
                ending = self._ending.wait(node.pause)
                self._readings.append(node.read())

    def _send_heartbeats(self) -> None:
        interval = heartbeat_interval(self._context.rank_info.world_size)
        try:
            while True:
                self._context.changed.clear()
                sent_at = time.monotonic()
                fields = self._fields  # read before the rows, so that a final state comes with all rows
                rows = self._context.take_rows(self._sent, 0)
                self._sent += len(rows)
                self._send({**self._changes(fields), **self._once(fields, rows)})
                if fields.get("ended"):
                    return
                # At a change at once, but never more often than MIN_INTERVAL.
                if self._context.changed.wait(interval):
                    time.sleep(max(sent_at + MIN_INTERVAL - time.monotonic(), 0.0))
        except OSError:
            os._exit(1)  # the heartbeat server is gone

    def _changes(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a heartbeat that differ from those sent before."""
        context = self._context
        now = {
            **fields,
            "step": context.step,
            "evaluated_batches": context.evaluated_batches,
            "waiting": context.is_waiting,
            "leaving": context.is_leaving,
            "modules": len(sys.modules),
            "work": context.work,
            "stage": context.stage,
        }
        now.pop("failed_at", None)
        changes = {name: value for name, value in now.items() if self._last.get(name, ...) != value}
        self._last.update(changes)
        for name in {"work", "stage"} & changes.keys():
            changes[name] = dataclasses.asdict(changes[name]) if changes[name] else None
        return changes

    def _once(self, fields: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what only this heartbeat has: rows, readings of the node, an answer and the time of a failure."""
        once: dict[str, Any] = {}
        if rows:
            once = {"rows": rows, "now": wall()}
        # Clocks of two hosts cannot be compared, so the message says how long ago something happened.
        if "failed_at" in fields:
            once["failed_ago"] = time.monotonic() - fields["failed_at"]
        if (hang := self._hang) is not None:
            self._hang = None
            once["hang"] = dataclasses.asdict(hang)
        if self._readings:
            once["nodes"] = [self._readings.popleft() for _ in range(len(self._readings))]
        return once

    def _read_messages(self) -> None:
        """Read the server's messages. The process ends after FENCE_TIMEOUT seconds without any."""
        self._socket.settimeout(FENCE_TIMEOUT)
        try:
            for line in self._socket.makefile("r"):
                message = json.loads(line)
                # Rows go out once, and are kept here until the controller says that they are stored: commits carry the
                # others.
                self._context.take_rows(0, message.get("saved", 0))
                if message.get("stop"):
                    self._context.request_stop()
                if "profile" in message:
                    self._context.ask_profile(message["profile"])
                if message.get("hangs"):
                    threading.Thread(target=self._on_hang, name="on-hang", daemon=True).start()
                if "port" in message:
                    self._context.set_store_port(message["port"])
                if message.get("acknowledged"):
                    self._acknowledged.set()
                    return
        except (OSError, ValueError):  # a connection that ends within a message
            pass
        os._exit(1)

    def _on_hang(self) -> None:
        """Tell the gang what this rank does; nothing if its program does not say."""

        def send(report: HangReport) -> None:
            self._hang = report
            self._context.changed.set()

        if self._context.on_hang is None:
            send(HangReport())
        else:
            self._context.on_hang(send)

    def _send(self, message: dict[str, Any]) -> None:
        # A heartbeat without news is an empty line, which the server need not parse.
        self._socket.sendall((json.dumps(message).encode() if message else b"") + b"\n")


def heartbeat_interval(world: int) -> float:
    """Return the seconds between two heartbeats of a rank when nothing has changed.

    The server reads all heartbeats in one thread. In a gang of more than 100 ranks each rank therefore beats less
    often, so that 1,000 heartbeats arrive in a second, but at least once a second. A rank is called silent after
    several seconds, see `orchestrator.controller.health`.
    """
    return min(max(world / BEATS, INTERVAL), LONGEST_INTERVAL)


def serve_store(host: str) -> Any:
    """Return a c10d TCPStore on a free port of `host`. It listens nowhere else, because it has no authentication.

    The socket is bound before its port is published, so no other process can take the port in between.
    """
    from torch.distributed import TCPStore

    bound = socket.create_server((host, 0), backlog=1024)
    port = bound.getsockname()[1]
    # `detach`, so that the end of `bound` does not close the descriptor, which the store owns from now on.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())


def describe(error: BaseException) -> str:
    """Return one line with the exception's class, its message and notes, and the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text[:500]}{notes}{line}"


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent (process id `parent`) dies (Linux)."""
    if os.name == "posix" and os.uname().sysname == "Linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before this process could register with the kernel

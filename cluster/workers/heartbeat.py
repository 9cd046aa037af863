"""Monitor the ranks of a gang. Each rank keeps a connection open; a closed connection means that the rank has died.

The kernel closes the connections of a killed process at once, so a death is detected in milliseconds. A frozen process
or a lost machine shows by the time since its last heartbeat. This module records that time, and
`orchestrator.controller.health` judges it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.gang import FINISHED, Cause, GangStatus, RankStatus
from cluster.workers.hang_report import HangReport
from cluster.workers.worker_context import Stage, Work

GAP_HALF_LIFE = 10.0
"""Seconds in which the remembered longest gap fades to half, whatever the number of ranks."""
SELECT_TIMEOUT = 0.2
"""The longest time between two reads of the connections, in seconds."""
SAVED_INTERVAL = 1.0
"""Seconds between messages to the ranks that send rows, which they keep until these are stored."""
PING_INTERVAL = 5.0
"""Seconds between messages to all ranks. A rank without any for `rank_process.FENCE_TIMEOUT` ends itself."""
BACKLOG = 4096
"""Connections that may wait to be accepted. The kernel may allow fewer (net.core.somaxconn)."""
FIELDS = ("state", "pid", "error", "result", "step", "evaluated_batches", "modules", "waiting", "leaving")
"""Fields of a message that are copied to the `RankStatus`."""


class HeartbeatServer:
    """Listens on `host` for the ranks of one attempt after another, in a background thread."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=BACKLOG)
        self._server.setblocking(False)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._changed = threading.Event()
        """Set when there is news for `poll`."""
        self._token = ""
        """Authenticates the ranks of the present attempt."""
        self._status: list[RankStatus] = []
        self._connections: dict[int, socket.socket] = {}
        """The connection of each rank."""
        self._rows: list[dict[str, Any]] = []
        """Rows that `poll` has not returned yet."""
        self._nodes: list[dict[str, Any]] = []
        """Readings of nodes that `poll` has not returned yet."""
        self._port = 0
        """The port of the c10d store on rank 0, 0 until that is known."""
        self._gap = 0.0
        """The longest recent gap between two heartbeats of a rank, in seconds, as of `_gap_at`."""
        self._gap_at = 0.0
        """The monotonic time of the last heartbeat that counted for it."""
        self._saved = 0
        """How many rows are safely stored."""
        self._told_at = self._pinged_at = 0.0
        """The monotonic times of the last message to the ranks that send rows, and to all."""
        self._with_rows: set[int] = set()
        """The ranks that send rows."""
        self._observed_at = time.monotonic()
        """Every message that arrived before this monotonic time has been read."""
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="heartbeat-server", daemon=True)
        self._thread.start()

    def expect(self, nodes: Sequence[str]) -> str:
        """Begin an attempt with one rank on each of these nodes, in order. Return the token for its ranks.

        Ranks of the previous attempt are disconnected, and then end themselves.
        """
        now = time.monotonic()
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._status = [
                RankStatus(n, node, 0, "starting", last_heartbeat=now) for n, node in enumerate(nodes)
            ]
            self._rows = []
            # What a rank of the attempt before still sends has the old token, and is dropped.
            self._connections, self._with_rows = {}, set()
            self._token = secrets.token_hex(16)
            self._port = 0
            self._gap = 0.0
            self._saved = 0
            return self._token

    def mark(self, rank: int, **fields: Any) -> None:
        """Set fields of a rank's status that do not come from its heartbeats.

        Args:
            rank: its number.
            fields: of `RankStatus`, with their values.
        """
        with self._lock:
            self._status[rank] = dataclasses.replace(self._status[rank], **fields)

    def poll(
        self, saved: int, wait: float, cause: Callable[[RankStatus], tuple[Cause, str]] | None = None
    ) -> GangStatus:
        """Return what happened since the last call, see `Gang.poll`.

        Args:
            saved: how many rows are safely stored.
            wait: seconds to wait for news.
            cause: called once for each rank that has died. It returns the cause and its message.
        """
        self._changed.wait(wait)
        self._changed.clear()
        # Without the lock: `cause` may wait seconds for a process to end, and heartbeats go on meanwhile.
        for rank in [r for r in self._status if r.state == "dead" and not r.error]:
            end, message = cause(rank) if cause else (Cause(), "")
            self.mark(rank.rank, cause=end, error=message)
        self._saved = saved
        with self._lock:
            rows, self._rows = self._rows, []
            nodes, self._nodes = self._nodes, []
            at = self._observed_at if self._thread.is_alive() else time.monotonic()
            return GangStatus(tuple(self._status), tuple(rows), self._gap, at, tuple(nodes))

    def ask_what_hangs(self) -> None:
        """Ask all ranks what they wait for. Their answers are `RankStatus.hang`; those to an earlier question go."""
        with self._lock:
            self._status = [dataclasses.replace(rank, hang=None) for rank in self._status]
        self.broadcast({"hangs": True})

    def broadcast(self, message: dict[str, Any], to: Set[int] | None = None) -> None:
        """Send a message to ranks. A rank with a full connection misses it, and soon counts as silent.

        Args:
            message: the message.
            to: the ranks; None for all.
        """
        line = _line(message)
        with self._lock:
            for rank, connection in self._connections.items():
                if to is None or rank in to:
                    _send(connection, line)

    def close(self) -> None:
        """Stop listening. Running ranks end themselves."""
        self._closed = True
        with contextlib.suppress(OSError):
            # A connection wakes the thread, which waits in `select`.
            socket.create_connection(self._server.getsockname()[:2], 1.0).close()

    # -- the listening thread

    def _listen(self) -> None:
        connections: dict[socket.socket, _Connection] = {}
        while not self._closed:
            self._selector.select(SELECT_TIMEOUT)
            # Taken between the two selects: what arrived before this time is seen by the second one, which does not
            # wait.
            observed_at = time.monotonic()
            self._ping()
            for key, _ in self._selector.select(0):
                if key.fileobj is self._server:
                    for accepted in self._accept():
                        connections[accepted] = _Connection(accepted)
                    continue
                connection = connections[key.fileobj]  # type: ignore[index]
                if not self._read(connection):
                    self._selector.unregister(connection.socket)
                    del connections[connection.socket]
                    connection.socket.close()
            with self._lock:
                # Set only now, when every message up to then is read, even if this process was frozen before.
                self._observed_at = observed_at
        for connection in connections.values():
            connection.socket.close()
        self._selector.close()
        self._server.close()

    def _accept(self) -> Iterator[socket.socket]:
        """Accept every connection that waits.

        One pass of the loop reads all ranks that beat. With one connection a pass, the last of a thousand ranks would
        wait for minutes.
        """
        with contextlib.suppress(OSError):  # none waits any more, or one was given up
            while True:
                accepted, _ = self._server.accept()
                accepted.setblocking(False)
                self._selector.register(accepted, selectors.EVENT_READ)
                yield accepted

    def _ping(self) -> None:
        """Tell the ranks at intervals that the run continues, and how many rows are saved.

        This happens in the listening thread, because the thread that polls may wait long for storage.
        """
        now = time.monotonic()
        if now - self._pinged_at > PING_INTERVAL:
            self._pinged_at = self._told_at = now
            self.broadcast({"saved": self._saved})
        elif now - self._told_at > SAVED_INTERVAL:
            self._told_at = now
            self.broadcast({"saved": self._saved}, to=self._with_rows)

    def _read(self, connection: _Connection) -> bool:
        """Read what has arrived on a connection. Returns whether to keep it."""
        try:
            data = connection.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._on_disconnect(connection)
            return False
        *lines, connection.unread = (connection.unread + data).split(b"\n")
        try:
            # A heartbeat without news is an empty line.
            return all(self._receive(connection, json.loads(line) if line else {}) for line in lines)
        except (ValueError, KeyError, TypeError):
            return False

    def _receive(self, connection: _Connection, message: dict[str, Any]) -> bool:
        """Handle one message of a rank. Returns whether to keep the connection."""
        with self._lock:
            if not connection.token:
                if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                    return False
                connection.token, connection.rank = self._token, message["rank"]
                self._connections[connection.rank] = connection.socket
                if self._port:
                    _send(connection.socket, _line({"port": self._port}))
            if connection.token != self._token:
                return False
            before = self._status[connection.rank]
            now = time.monotonic()
            if before.state == "running":
                # The longest gap, which fades: limits on silence follow what this gang and machine did lately.
                faded = self._gap * 0.5 ** ((now - self._gap_at) / GAP_HALF_LIFE)
                self._gap, self._gap_at = max(now - before.last_heartbeat, faded), now
            fields = _status_fields(message, now) if message else {}
            status = dataclasses.replace(before, last_heartbeat=now, **fields)
            self._status[connection.rank] = status
            if message:
                self._take(connection, status, message)
        return True

    def _take(self, connection: _Connection, status: RankStatus, message: dict[str, Any]) -> None:
        """Handle what only this message of a rank has, which by now has this status."""
        if message.get("rows"):
            self._rows += _with_local_times(message)
            self._with_rows.add(status.rank)
        if readings := message.get("nodes"):
            shared_fields = {"time": wall(), "node": status.node, "step": max(status.step, 0)}
            self._nodes += [{**shared_fields, "values": values} for values in readings]
        if message.get("port") and not self._port:
            self._port = message["port"]
            line = _line({"port": self._port})
            for other in self._connections.values():
                _send(other, line)
        if message.get("ended"):
            _send(connection.socket, _line({"acknowledged": True}))
        if message.get("rows") or message.get("ended") or "hang" in message:
            self._changed.set()

    def _on_disconnect(self, connection: _Connection) -> None:
        with self._lock:
            if connection.token != self._token or not self._token:
                return
            status = self._status[connection.rank]
            if status.state not in FINISHED:
                self._status[connection.rank] = dataclasses.replace(
                    status, state="dead", failed_at=time.monotonic()
                )
        self._changed.set()


class _Connection:
    """A rank's connection: its rank and token once it has sent them, and the start of an incomplete line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.unread = b""
        self.token = ""
        self.rank = -1


def _status_fields(message: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the fields of a `RankStatus` that a message sets, which arrived at the monotonic time `now`."""
    fields = {name: message[name] for name in FIELDS if name in message}
    if "work" in message:
        fields["work"] = Work(**message["work"]) if message["work"] else None
    if "stage" in message:
        fields["stage"] = Stage(**message["stage"])
    if "hang" in message:
        fields["hang"] = HangReport.from_json(message["hang"])
    if "failed_ago" in message:
        fields |= {"failed_at": now - message["failed_ago"], "cause": Cause(**message["cause"])}
    return fields


def _with_local_times(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a message with their `time` by this host's clock, since clocks of hosts may differ."""
    offset = wall() - message["now"] if "now" in message else 0.0
    return [{**row, "time": row["time"] + offset} if "time" in row else row for row in message["rows"]]


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(connection: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):
        # One frozen rank must not hold up the thread that reads all others.
        if connection.send(line, socket.MSG_DONTWAIT) < len(line):
            # The next message would follow the half of this one. A rank so far behind is given up, and counts as dead.
            connection.shutdown(socket.SHUT_RDWR)

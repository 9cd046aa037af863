"""How a gang hears of its ranks: each holds a connection, and a connection that ends is a rank that is gone.

The kernel closes the connections of a killed process at once, so a death is seen in milliseconds, whatever killed
it; a process or a machine that merely falls silent is seen by the time since its last beat.
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
from collections.abc import Callable, Sequence
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.gang import FINISHED, Cause, GangStatus, RankStatus

FADING = 0.98
"""What is left of the largest gap between beats after each further beat."""
LOOK = 0.2
"""Seconds between looks at the connections at most."""
REPLY = 1.0
"""Seconds between words to ranks, which end themselves when they hear nothing."""
FIELDS = ("state", "error", "result", "step", "waiting", "leaving")


class HeartbeatServer:
    """Listens on `host` for the ranks of one attempt after another."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=1024)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._lock, self._news = threading.Lock(), threading.Event()
        self._status: list[RankStatus] = []
        self._callers: dict[int, socket.socket] = {}
        self._rows: list[dict[str, Any]] = []
        self._token, self._port, self._gap, self._replied = "", 0, 0.0, 0.0
        self._saved = 0
        self._closed, self._looked = False, time.monotonic()
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._thread.start()

    def expect(self, nodes: Sequence[str]) -> str:
        """Forget the attempt before; ranks on these nodes, in order, are the next one's. Returns the token by which
        they are known."""
        now = time.monotonic()
        with self._lock:
            for caller in self._callers.values():
                with contextlib.suppress(OSError):  # no rank of before may think that it is still wanted
                    caller.shutdown(socket.SHUT_RDWR)
            self._status = [RankStatus(n, node, 0, "starting", heard=now) for n, node in enumerate(nodes)]
            self._rows, self._callers = [], {}
            self._token, self._port, self._gap, self._saved = secrets.token_hex(16), 0, 0.0, 0
            return self._token

    def mark(self, rank: int, **fields: Any) -> None:
        """Note what is known of a rank from elsewhere."""
        with self._lock:
            self._status[rank] = dataclasses.replace(self._status[rank], **fields)

    def poll(
        self, saved: int, wait: float, cause: Callable[[RankStatus], tuple[Cause, str]] | None = None
    ) -> GangStatus:
        """What happened since the last call, or within `wait` seconds from now; see `Gang.poll`.

        `cause` is asked once why a rank is dead, and for that in words.
        """
        self._news.wait(wait)
        self._news.clear()
        for rank in [r for r in self._status if r.state == "dead" and not r.error]:
            why, told = cause(rank) if cause else (Cause(), "")
            self.mark(rank.rank, cause=why, error=told)
        self._saved = saved
        with self._lock:
            rows, self._rows = self._rows, []
            at = self._looked if self._thread.is_alive() else time.monotonic()
            return GangStatus(tuple(self._status), tuple(rows), self._gap, at)

    def tell(self, message: dict[str, Any]) -> None:
        """A word to all ranks. One whose connection is full does not listen, and is found silent soon."""
        with self._lock:
            for caller in self._callers.values():
                _send(caller, message)

    def close(self) -> None:
        """Hear no more. Ranks that still run end themselves."""
        self._closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self._server.getsockname()[:2], 1.0).close()

    # -- the listening thread

    def _listen(self) -> None:
        callers: dict[socket.socket, _Connection] = {}
        while not self._closed:
            self._selector.select(LOOK)
            looked = time.monotonic()
            self._reply()
            for key, _ in self._selector.select(0):
                if key.fileobj is self._server:
                    accepted, _ = self._server.accept()
                    accepted.setblocking(False)
                    self._selector.register(accepted, selectors.EVENT_READ)
                    callers[accepted] = _Connection(accepted)
                    continue
                caller = callers[key.fileobj]  # type: ignore[index]
                if not self._read(caller):
                    self._selector.unregister(caller.socket)
                    del callers[caller.socket]
                    caller.socket.close()
            with self._lock:
                self._looked = looked  # no sooner: what had come by then is heard now, a freeze before or not
        for caller in callers.values():
            caller.socket.close()
        self._selector.close()
        self._server.close()

    def _reply(self) -> None:
        """Say now and then that there is someone: from this thread, since who polls may wait long for storage."""
        if time.monotonic() - self._replied > REPLY:
            self._replied = time.monotonic()
            with self._lock:
                for caller in self._callers.values():
                    _send(caller, {"saved": self._saved})

    def _read(self, caller: _Connection) -> bool:
        """Take in what a caller said. Returns whether to go on listening to it."""
        try:
            data = caller.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._hung_up(caller)
            return False
        *lines, caller.rest = (caller.rest + data).split(b"\n")
        try:
            return all(self._hear(caller, json.loads(line)) for line in lines)
        except (ValueError, KeyError, TypeError):
            return False

    def _hear(self, caller: _Connection, message: dict[str, Any]) -> bool:
        with self._lock:
            if not caller.token:
                if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                    return False
                caller.token, caller.rank = self._token, message["rank"]
                self._callers[caller.rank] = caller.socket
                if self._port:
                    _send(caller.socket, {"port": self._port})
            if caller.token != self._token:
                return False
            before, now = self._status[caller.rank], time.monotonic()
            if before.state == "running":
                self._gap = max(now - before.heard, self._gap * FADING)
            fields = {name: message[name] for name in FIELDS if name in message}
            fields |= {"pid": message["pid"]} if "pid" in message else {}
            if "failed_ago" in message:
                fields |= {"failed_at": now - message["failed_ago"], "cause": Cause(**message["cause"])}
            self._status[caller.rank] = dataclasses.replace(before, heard=now, **fields)
            self._rows += _by_our_clock(message)
            if message.get("port") and not self._port:
                self._port = message["port"]
                for other in self._callers.values():
                    _send(other, {"port": self._port})
            if message.get("ended"):
                _send(caller.socket, {"bye": True})
        if message.get("rows") or message.get("ended"):
            self._news.set()
        return True

    def _hung_up(self, caller: _Connection) -> None:
        with self._lock:
            if caller.token != self._token or not self._token:
                return
            status = self._status[caller.rank]
            if status.state not in FINISHED:
                self._status[caller.rank] = dataclasses.replace(
                    status, state="dead", failed_at=time.monotonic()
                )
        self._news.set()


class _Connection:
    """A connection: whose it is once it has said so, and the line that has not ended yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rest, self.token, self.rank = connection, b"", "", -1


def _by_our_clock(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a message with their `time` by the clock of this host: nobody sees to it that hosts agree."""
    rows: list[dict[str, Any]] = message.get("rows") or []
    behind = wall() - message["now"] if "now" in message else 0.0
    return [{**row, "time": row["time"] + behind} if "time" in row else row for row in rows]


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)

"""Connections to servers that hold bytes in the memory of nodes, see `snapshot_server` for the form of messages."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.checkpoint.snapshot_server import ERRNO, receive, receive_message, send

CONNECT_TIMEOUT = 2.0
"""Seconds for a server to accept a connection."""
UNRESPONSIVE_SECONDS = 10.0
"""Seconds for which a server that timed out is not asked again, because its node may be cut off from the network."""


class Connections:
    """Connections to servers with one token. Methods are thread-safe. A connection serves one request at a time."""

    def __init__(self, token: str, timeout: float) -> None:
        """
        Args:
            token: the token that the servers were started with.
            timeout: seconds for a server to answer.
        """
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: dict[str, list[socket.socket]] = {}
        """Connections that no thread uses, by address."""
        self._unresponsive: dict[str, float] = {}
        """The monotonic time at which a server timed out, by address."""

    def ask(
        self,
        server: str,
        request: dict[str, Any],
        *buffers: bytes | memoryview,
        target: memoryview | None = None,
    ) -> dict[str, Any]:
        """Return a server's answer, with its "bytes" unless they go into `target`.

        Args:
            server: the address of the server.
            request: what is asked.
            buffers: the bytes that follow it.
            target: where the bytes of the answer go; its "size" says how many came.

        Raises:
            OSError: the server refuses, or does not answer in time.
        """
        if time.monotonic() - self._unresponsive.get(server, -UNRESPONSIVE_SECONDS) < UNRESPONSIVE_SECONDS:
            raise TimeoutError(f"the server at {server} did not answer a moment ago")
        request = request | {"token": self._token}
        try:
            with self._lock:
                idle = self._idle.get(server)
                connection = idle.pop() if idle else None
            if connection is not None:
                # The server may have ended the connection since; a new one tells whether it is gone.
                with contextlib.suppress(ConnectionError):
                    return self._ask_on(server, connection, request, buffers, target)
            host, _, port = server.rpartition(":")
            connection = socket.create_connection((host, int(port)), min(self._timeout, CONNECT_TIMEOUT))
            connection.settimeout(self._timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._ask_on(server, connection, request, buffers, target)
        except TimeoutError:
            self._unresponsive[server] = time.monotonic()
            raise

    def _ask_on(
        self,
        server: str,
        connection: socket.socket,
        request: dict[str, Any],
        buffers: Sequence[bytes | memoryview],
        target: memoryview | None,
    ) -> dict[str, Any]:
        """Ask on a connection, which is kept if the answer arrives whole."""
        try:
            send(connection, request, *buffers)
            answer = receive_message(connection)
            if target is None:
                answer["bytes"] = bytes(receive(connection, memoryview(bytearray(answer["size"]))))
            else:
                receive(connection, target[: answer["size"]])
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(server, []).append(connection)
        if "error" in answer:
            code = ERRNO[answer["error"]]
            raise OSError(code, os.strerror(code), request.get("name", ""))
        return answer

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for connection in [each for idle in self._idle.values() for each in idle]:
                connection.close()
            self._idle.clear()

"""The snapshot server: a process that keeps the latest snapshots of other nodes in memory.

    echo '{"token": "...", "host": "10.0.0.7", "limit_bytes": 1000000000}' |
        python -m orchestrator.checkpoint.snapshot_server

It prints its address and serves until its standard input ends. A connection carries one request: a length, JSON of that
length, and for writes the bytes. The answer has the same form. The server closes a connection without the right token.
The bytes are not encrypted, so `host` should be an address in the cluster's own network.
"""

from __future__ import annotations

import errno
import hmac
import json
import socket
import socketserver
import sys
import threading
from typing import Any

LIMIT = 8 << 30
"""The default of `limit_bytes`."""
ERRNO = {"missing": errno.ENOENT, "exists": errno.EEXIST, "full": errno.ENOSPC, "malformed": errno.EPROTO}


def send(connection: socket.socket, message: dict[str, Any], *buffers: bytes | memoryview) -> None:
    """Send a JSON message and the bytes that follow it. Its "size" is their number."""
    head = json.dumps(message | {"size": sum(map(len, buffers))}).encode()
    connection.sendall(len(head).to_bytes(4, "little") + head)
    for buffer in buffers:
        connection.sendall(buffer)


def receive(connection: socket.socket, into: memoryview) -> memoryview:
    """Fill `into` and return it. Raises ConnectionError if the connection ends too early."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            raise ConnectionResetError("the peer hung up")
        done += count
    return into


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Receive the JSON part of a message, of at most 64 KiB."""
    size = int.from_bytes(receive(connection, memoryview(bytearray(4))), "little")
    if size > 1 << 16:
        raise ConnectionResetError("not a message")
    return dict(json.loads(bytes(receive(connection, memoryview(bytearray(size))))))


class SnapshotServer:
    """Files in memory, at most `limit_bytes` in total, served on a socket. They are lost with the process."""

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0, limit_bytes: int = LIMIT) -> None:
        self._files: dict[str, bytearray] = {}
        self._arriving = 0
        """Bytes of the writes in progress."""
        self._lock = threading.Lock()
        self._token = token
        self._limit = limit_bytes
        outer = self

        class Request(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer._serve(self.request)

        self._server = socketserver.ThreadingTCPServer((host, port), Request)
        self._server.daemon_threads = True
        self.address = "{}:{}".format(*self._server.server_address[:2])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving and free the memory."""
        self._server.shutdown()
        self._server.server_close()
        self._files.clear()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(60.0)
        try:
            request = receive_message(connection)
            if not hmac.compare_digest(str(request["token"]).encode(), self._token.encode()):
                return
            answer, buffer = self._answer(connection, request)
            send(connection, answer, buffer)
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _answer(
        self, connection: socket.socket, request: dict[str, Any]
    ) -> tuple[dict[str, Any], memoryview]:
        """Carry out a request. Return the answer and the bytes that follow it."""
        nothing = memoryview(b"")
        path = request.get("path", "")
        match request["do"]:
            case "list":
                with self._lock:
                    files = {name: len(data) for name, data in self._files.items()}
                return {}, memoryview(json.dumps(files).encode())
            case "read":
                held = self._files.get(path)
                if held is None:
                    return {"error": "missing"}, nothing
                start = request["offset"]
                return {}, memoryview(held)[start : start + request["count"]]
            case "write":
                return self._write(connection, path, request), nothing
            case "remove":
                with self._lock:
                    self._files.pop(path, None)
                return {}, nothing
        return {"error": "malformed"}, nothing

    def _write(self, connection: socket.socket, path: str, request: dict[str, Any]) -> dict[str, Any]:
        size = request["size"]
        with self._lock:
            full = size + self._arriving + sum(map(len, self._files.values())) > self._limit
            self._arriving += 0 if full else size
        if full:
            # the bytes are received and dropped, because an answer before that would be lost with the connection
            scratch = memoryview(bytearray(min(size, 1 << 20)))
            for at in range(0, size, len(scratch) or 1):
                receive(connection, scratch[: size - at])
            return {"error": "full"}
        try:
            data = bytearray(size)
            receive(connection, memoryview(data))
            with self._lock:
                if request["only_new"] and path in self._files:
                    return {"error": "exists"}
                self._files[path] = data
        finally:
            with self._lock:
                self._arriving -= size
        return {}


def main() -> None:
    """Serve until standard input ends, which happens when the parent exits."""
    settings = json.loads(sys.stdin.readline())
    print(SnapshotServer(**settings).address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

"""Peers that accept connections and say nothing, as one whose network is cut, or hardly anything."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, Callable[[], int]]]:
    """Its address, and how many connections have come so far."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        held: list[socket.socket] = []

        def calls() -> int:
            with contextlib.suppress(BlockingIOError):
                while True:
                    held.append(server.accept()[0])
            return len(held)

        try:
            yield "{}:{}".format(*server.getsockname()), calls
        finally:
            for connection in held:
                connection.close()


@contextlib.contextmanager
def trickling() -> Iterator[str]:
    """The address of an HTTP server that begins an answer at once and sends a byte of it a second."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(answer)
            while not over.wait(1.0):
                connection.sendall(b" ")

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield "{}:{}".format(*server.getsockname())
        finally:
            over.set()

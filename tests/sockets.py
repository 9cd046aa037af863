"""A peer that accepts connections and says nothing, as one whose network is cut."""

from __future__ import annotations

import contextlib
import socket
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

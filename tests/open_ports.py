"""The ports that processes listen on, and what they say to one who comes without a token."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import psutil


def listening(family: Iterable[psutil.Process]) -> set[tuple[str, int, str, int]]:
    """Address, port, name and id of all of these processes that listen."""
    found = set()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray's idle workers come and go
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port, process.name(), process.pid))
    return found


def served(places: set[tuple[str, int, str, int]]) -> list[tuple[object, ...]]:
    """Where something else than a refusal was answered, and what."""

    def ask(place: tuple[str, int, str, int]) -> list[tuple[object, ...]]:
        host = place[0] if place[0].startswith("127.") else "127.0.0.1"
        found: list[tuple[object, ...]] = []
        for path in (b"/metrics", b"/api/version", b"/api/jobs/"):
            status = status_of(host, place[1], path)
            if status is None:
                break
            found += [(*place, path, status)] if status not in (401, 403) else []
        return found

    with ThreadPoolExecutor(len(places)) as pool:  # those that are silent take their whole time
        return [answer for answers in pool.map(ask, sorted(places)) for answer in answers]


def status_of(host: str, port: int, path: bytes) -> int | None:
    """The HTTP status of an answer; None if it is none of HTTP/1, as from gRPC."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = connection.recv(64)
    except OSError:  # closed at once, or silent
        return None
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1") else None

"""Commits in the memory of holders on several nodes: a backend like any other, gone when its nodes are.

A shard lies with the holders that its writer was told to use, a manifest with all of them. What a lost node held
is missing, which makes those commits unsound, and the ones before or the durable store are used.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from orchestrator.checkpoint.snapshot_server import ERRNO, receive, receive_message, send
from orchestrator.storage.backend import Buffers

CONNECT_TIMEOUT = 2.0
"""Seconds for a holder to accept a connection."""
SHUNNED = 10.0
"""Seconds for which a holder that was silent for so long is not asked again: its node may be cut off."""


def peers_uri(token: str, holders: list[str], write_to: list[str]) -> str:
    """The URI of a store in the memory of `holders`, whose shards this process sends to `write_to`."""
    return f"peers://{token}@{','.join(holders)}?to={','.join(write_to)}"


class PeerBackend:
    """The files of all holders that answer, as one tree.

    A read takes the first holder that has the file. A write fails if one of its holders does; a publication and
    a removal only if all do.
    """

    def __init__(self, uri: str, timeout: float) -> None:
        parts = urlsplit(uri)
        self._token, _, names = parts.netloc.rpartition("@")
        self._holders = names.split(",")
        self._write_to = parse_qs(parts.query)["to"][0].split(",")
        self._timeout = timeout
        self._silent: dict[str, float] = {}  # when a holder was found silent, monotonic seconds

    def list(self, folder: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for answer in self._ask_all({"do": "list"}):
            found |= answer["files"]
        return {path: size for path, size in found.items() if not folder or path.startswith(folder + "/")}

    def read(self, path: str) -> bytes:
        size = self.list().get(path, 0)
        target = memoryview(bytearray(size))
        return bytes(target[: self.read_into(path, 0, target)])

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        error: OSError = FileNotFoundError(ERRNO["missing"], "no holder has it", path)
        for holder in self._holders:
            try:
                request = {"do": "read", "path": path, "offset": offset, "count": len(target)}
                return int(self._ask(holder, request, target=target)["size"])
            except FileNotFoundError:
                continue
            except OSError as failure:
                error = failure
        raise error

    def write(self, path: str, buffers: Buffers) -> None:
        for holder in self._write_to:
            self._ask(holder, {"do": "write", "path": path, "only_new": False}, buffers)

    def publish(self, path: str, data: bytes) -> None:
        self._ask_all({"do": "write", "path": path, "only_new": True}, [data])

    def replace(self, path: str, data: bytes) -> None:
        self._ask_all({"do": "write", "path": path, "only_new": False}, [data])

    def remove(self, path: str, settle: bool = False) -> None:
        self._ask_all({"do": "remove", "path": path})

    def remove_folder(self, folder: str) -> None:
        """There are no folders."""

    def _ask_all(self, request: dict[str, Any], buffers: Buffers = ()) -> Sequence[dict[str, Any]]:
        """The answers of the holders that can be reached; the last failure if none can."""
        answers, error = [], OSError("there are no holders")
        for holder in self._holders:
            try:
                answers.append(self._ask(holder, request, buffers))
            except FileExistsError:
                raise
            except OSError as failure:
                error = failure
        if not answers:
            raise error
        return answers

    def _ask(
        self, holder: str, request: dict[str, Any], buffers: Buffers = (), target: memoryview | None = None
    ) -> dict[str, Any]:
        if time.monotonic() - self._silent.get(holder, -SHUNNED) < SHUNNED:
            raise TimeoutError(f"the holder at {holder} was silent a moment ago")
        try:
            return self._ask_now(holder, request, buffers, target)
        except TimeoutError:
            self._silent[holder] = time.monotonic()
            raise

    def _ask_now(
        self, holder: str, request: dict[str, Any], buffers: Buffers, target: memoryview | None
    ) -> dict[str, Any]:
        host, _, port = holder.rpartition(":")
        with socket.create_connection((host, int(port)), min(self._timeout, CONNECT_TIMEOUT)) as connection:
            connection.settimeout(self._timeout)
            send(connection, request | {"token": self._token}, *buffers)
            answer = receive_message(connection)
            if "error" in answer:
                code = ERRNO[answer["error"]]
                raise OSError(code, os.strerror(code), request.get("path", ""))
            if target is not None:
                receive(connection, target[: answer["size"]])
        return answer

"""The storage backend of snapshots: files in the memory of snapshot servers on several nodes.

A shard is stored on the servers that its writer uses, a manifest on all servers. If a node is lost, the commits that it
had shards of are unsound, and a run restores an earlier one or one in the durable store.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from orchestrator.checkpoint.snapshot_server import ERRNO, receive, receive_message, send
from orchestrator.storage.backend import Buffers

CONNECT_TIMEOUT = 2.0
"""Seconds for a server to accept a connection."""
UNRESPONSIVE_SECONDS = 10.0
"""Seconds for which a server that timed out is not asked again, because its node may be cut off from the network."""


def peers_uri(token: str, servers: list[str], write_to: list[str]) -> str:
    """Return the URI of a store in the memory of `servers`. This process writes its shards to those in `write_to`."""
    return f"peers://{token}@{','.join(servers)}?to={','.join(write_to)}"


class PeerBackend:
    """A `Backend` that shows the files of all servers that answer as one tree.

    A read uses the first server that has the file. A write fails if one of its servers fails. Publishing and removing
    fail only if all servers fail.
    """

    def __init__(self, uri: str, timeout: float) -> None:
        parts = urlsplit(uri)
        self._token, _, names = parts.netloc.rpartition("@")
        self._servers = names.split(",")
        self._write_to = parse_qs(parts.query)["to"][0].split(",")
        self._timeout = timeout
        self._unresponsive: dict[str, float] = {}
        """The monotonic time at which a server timed out, by address."""

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
        error: OSError = FileNotFoundError(ERRNO["missing"], "no snapshot server has it", path)
        for server in self._servers:
            try:
                request = {"do": "read", "path": path, "offset": offset, "count": len(target)}
                return int(self._ask(server, request, target=target)["size"])
            except FileNotFoundError:
                continue
            except OSError as failure:
                error = failure
        raise error

    def write(self, path: str, buffers: Buffers) -> None:
        for server in self._write_to:
            self._ask(server, {"do": "write", "path": path, "only_new": False}, buffers)

    def publish(self, path: str, data: bytes) -> None:
        self._ask_all({"do": "write", "path": path, "only_new": True}, [data])

    def replace(self, path: str, data: bytes | memoryview) -> None:
        self._ask_all({"do": "write", "path": path, "only_new": False}, [data])

    def remove(self, path: str, settle: bool = False) -> None:
        self._ask_all({"do": "remove", "path": path})

    def remove_folder(self, folder: str) -> None:
        """Do nothing, because this backend has no folders."""

    def _ask_all(self, request: dict[str, Any], buffers: Buffers = ()) -> Sequence[dict[str, Any]]:
        """Return the answers of all reachable servers. Raises the last error if no server is reachable."""
        answers = []
        error = OSError("there are no snapshot servers")
        for server in self._servers:
            try:
                answers.append(self._ask(server, request, buffers))
            except FileExistsError:
                raise
            except OSError as failure:
                error = failure
        if not answers:
            raise error
        return answers

    def _ask(
        self, server: str, request: dict[str, Any], buffers: Buffers = (), target: memoryview | None = None
    ) -> dict[str, Any]:
        if time.monotonic() - self._unresponsive.get(server, -UNRESPONSIVE_SECONDS) < UNRESPONSIVE_SECONDS:
            raise TimeoutError(f"the snapshot server at {server} did not answer a moment ago")
        try:
            return self._ask_now(server, request, buffers, target)
        except TimeoutError:
            self._unresponsive[server] = time.monotonic()
            raise

    def _ask_now(
        self, server: str, request: dict[str, Any], buffers: Buffers, target: memoryview | None
    ) -> dict[str, Any]:
        host, _, port = server.rpartition(":")
        with socket.create_connection((host, int(port)), min(self._timeout, CONNECT_TIMEOUT)) as connection:
            connection.settimeout(self._timeout)
            send(connection, request | {"token": self._token}, *buffers)
            answer = receive_message(connection)
            if "error" in answer:
                code = ERRNO[answer["error"]]
                raise OSError(code, os.strerror(code), request.get("path", ""))
            if request["do"] == "list":
                answer["files"] = json.loads(
                    bytes(receive(connection, memoryview(bytearray(answer["size"]))))
                )
            if target is not None:
                receive(connection, target[: answer["size"]])
        return answer

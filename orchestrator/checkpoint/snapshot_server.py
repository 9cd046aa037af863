"""The snapshot server: a process on each node that keeps the latest snapshots of ranks in memory.

    echo '{"token": "...", "host": "10.0.0.7", "limit_bytes": 1000000000}' |
        python -m orchestrator.checkpoint.snapshot_server

It prints its address and serves until its standard input ends. A connection carries any number of requests: a length,
JSON of that length, and for some the bytes. An answer has the same form. The server closes a connection without the
right token. The bytes are not encrypted, so `host` should be an address in the cluster's own network.

Each writer's part of a snapshot is held twice: on its own node in the memory that the rank has filled, which this
server opens and which so outlives the rank, and on another node as a copy. The loss of any one node loses none.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

LIMIT = 8 << 30
"""The default of `limit_bytes`."""
ERRNO = {
    "missing": errno.ENOENT,
    "full": errno.ENOSPC,
    "malformed": errno.EPROTO,
    "replaced": errno.EACCES,
    "unshared": errno.EOPNOTSUPP,
}
STALL = 60.0
"""Seconds without a byte of a message that has begun after which its connection ends."""
SENT_AT_ONCE = 1 << 24
"""Bytes that must be sent within the time limit of a connection."""
HEAD_BYTES = 8 + 16
"""Bytes before a note in its file: its length and its checksum."""


def send(connection: socket.socket, message: dict[str, Any], *buffers: bytes | memoryview) -> None:
    """Send a JSON message and the bytes that follow it. Its "size" is their number.

    Args:
        connection: the socket.
        message: becomes JSON.
        buffers: the bytes that follow.
    """
    head = json.dumps(message | {"size": sum(map(len, buffers))}).encode()
    connection.sendall(len(head).to_bytes(4, "little") + head)
    for buffer in buffers:
        view = memoryview(buffer)  # of which slices are no copies
        # The time limit of a connection is for all of a `sendall`, and a large tensor may take longer.
        for at in range(0, len(view), SENT_AT_ONCE):
            connection.sendall(view[at : at + SENT_AT_ONCE])


def receive(connection: socket.socket, into: memoryview) -> memoryview:
    """Fill `into` and return it. Raises ConnectionError if the connection ends too early.

    Args:
        connection: the socket.
        into: what to fill.
    """
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


def write_note(file: int, note: bytes) -> None:
    """Write the note about a part into its file. The head comes last: a note that is cut short does not count.

    Args:
        file: descriptor of the note's file.
        note: JSON.
    """
    os.pwrite(file, note, HEAD_BYTES)
    os.pwrite(file, len(note).to_bytes(8, "little") + xxhash.xxh3_128_digest(note), 0)


def clear_note(file: int) -> None:
    """Withdraw the note in this file, because the memory that it describes is about to change."""
    os.pwrite(file, bytes(HEAD_BYTES), 0)


def read_note(file: int) -> bytes:
    """Return the note in a file, empty without a whole one."""
    head = os.pread(file, HEAD_BYTES, 0)
    note = os.pread(file, int.from_bytes(head[:8], "little"), HEAD_BYTES)
    return note if note and xxhash.xxh3_128_digest(note) == head[8:] else b""


def listen(host: str, port: int, serve: Callable[[socket.socket], None]) -> socketserver.ThreadingTCPServer:
    """Return a server that calls `serve` in a thread of its own for each connection, until it is shut down.

    Args:
        host: address to listen at.
        port: 0 for any free one.
        serve: serves a connection until it ends.
    """

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            serve(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 1024

    server = Server((host, port), Connection)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def answer_all(
    connection: socket.socket, token: str, answer: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> None:
    """Answer the requests of a connection until it ends, or sends a wrong token or no message.

    Args:
        connection: the socket.
        token: that every request must carry.
        answer: returns the answer to a request, and the bytes that follow it.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        # A connection is idle between two requests, for as long as that takes.
        while connection.recv(1, socket.MSG_PEEK):
            connection.settimeout(STALL)
            request = receive_message(connection)
            if not hmac.compare_digest(str(request["token"]).encode(), token.encode()):
                return
            header, *buffers = answer(request)
            send(connection, header, *buffers)
            connection.settimeout(None)


@dataclass
class Part:
    """One writer's part of a snapshot: a note, which is JSON, and bytes, here or in a rank's memory.

    Attributes:
        attempt: the attempt of the run that wrote it.
        note: where each piece of a tensor is in the bytes, see `snapshot_writer`.
        data: the bytes, or a file descriptor of the memory that has them.
    """

    attempt: int
    note: bytes
    data: bytearray | int

    def read(self, offset: int, count: int) -> memoryview:
        """Return up to `count` bytes from `offset` on.

        Args:
            offset: first byte.
            count: bytes at most.
        """
        if isinstance(self.data, int):
            return memoryview(os.pread(self.data, count, offset))
        return memoryview(self.data)[offset : offset + count]

    def free(self) -> None:
        """Let go of the memory."""
        if isinstance(self.data, int):
            os.close(self.data)


@dataclass
class Shared:
    """The memory of one rank of this node, which its writing process shares while it lives.

    Attributes:
        attempt: the attempt of the run.
        files: the memory and the note of each generation, as file descriptors.
        alive: whether the process may still write a note.
    """

    attempt: int
    files: list[tuple[int, int]]
    alive: bool = True

    def parts(self) -> Iterator[tuple[int, Part]]:
        """Yield the step and the part of each generation that has a note."""
        for memory, file in self.files:
            if note := read_note(file):
                yield int(json.loads(note)["step"]), Part(self.attempt, note, memory)

    def free(self) -> None:
        """Let go of the memory."""
        for pair in self.files:
            for file in pair:
                os.close(file)


def _is_unread(data: bytearray) -> bool:
    """Whether no connection still sends from this memory: Python refuses to resize a bytearray that has a view."""
    if data:
        try:
            data.append(data.pop())  # both within what is allocated, so that nothing moves
        except BufferError:
            return False
    return True


class SnapshotServer:
    """Parts of snapshots in memory, at most `limit_bytes` of copies, served on a socket. They end with the process."""

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0, limit_bytes: int = LIMIT) -> None:
        self._parts: dict[tuple[int, str], Part] = {}
        """By step and name of the file."""
        self._shared: dict[str, Shared] = {}
        """By name of the file."""
        self._manifest: tuple[int, bytes, str, memoryview] = (-1, b"", "", memoryview(b""))
        """The step that the run restores, its manifest, and the name and the bytes of its index file."""
        self._attempt = 0
        """Parts of earlier attempts are refused."""
        self._arriving = 0
        """Bytes of the copies that arrive."""
        self._changed = threading.Condition()
        """Guards all of it. Notified when a process that shares memory ends."""
        self._token = token
        self._limit = limit_bytes
        self._server = listen(host, port, self._serve)
        self.address = "{}:{}".format(*self._server.server_address[:2])

    def close(self) -> None:
        """Stop serving and free the memory."""
        self._server.shutdown()
        self._server.server_close()
        with self._changed:
            self._free(lambda step, part: True)
            while self._shared:
                self._shared.popitem()[1].free()

    def _serve(self, connection: socket.socket) -> None:
        mine: list[Shared] = []
        try:
            answer_all(connection, self._token, lambda request: self._answer(connection, request, mine))
        finally:
            with self._changed:
                for shared in mine:
                    shared.alive = False
                self._changed.notify_all()

    def _answer(
        self, connection: socket.socket, request: dict[str, Any], mine: list[Shared]
    ) -> tuple[Any, ...]:
        """Carry out a request of a connection that shares `mine`. Return the answer and the bytes that follow it."""
        match request["do"]:
            case "keep":
                return (self._keep(connection, request),)
            case "share":
                return (self._share(request, mine),)
            case "notes":
                notes = self._notes(float(request["wait"]))
                return {}, b"[" + b",".join(notes) + b"]"
            case "read":
                return self._read(request)
            case "rewind":
                received = receive(connection, memoryview(bytearray(request["size"])))
                end = int(request["manifest"])
                self._rewind(request, bytes(received[:end]), received[end:])
                return ({},)
            case "manifest":
                step, manifest, *_ = self._manifest
                return ({}, manifest) if step == request["step"] and manifest else ({"error": "missing"},)
        return ({"error": "malformed"},)

    def _keep(self, connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        """Receive a part: its note and its bytes. Free what it replaces: parts of before `complete` but `spared`."""
        step = request["step"]
        name = request["name"]
        attempt = request["attempt"]
        note = bytearray(request["note"])
        size = request["size"] - request["note"]
        with self._changed:
            refused = "replaced" if attempt < self._attempt else ""
            freed = (
                []
                if refused
                else self._free(
                    lambda at, part: (
                        at[0] < request["complete"]
                        and at[0] != request.get("spared")
                        and (at[1] == name or part.attempt < attempt)
                    )
                )
            )
            stored_bytes = sum(
                len(part.data) for part in self._parts.values() if isinstance(part.data, bytearray)
            )
            if not refused and request["size"] + self._arriving + stored_bytes > self._limit:
                refused = "full"
            self._arriving += 0 if refused else request["size"]
        if refused:
            # the bytes are received and dropped, because an answer before that would be lost with the connection
            scratch = memoryview(bytearray(min(request["size"], 1 << 20)))
            for at in range(0, request["size"], len(scratch) or 1):
                receive(connection, scratch[: request["size"] - at])
            return {"error": refused}
        try:
            # Memory that was just freed needs no new pages.
            data = next((old for old in freed if len(old) == size and _is_unread(old)), None) or bytearray(
                size
            )
            receive(connection, memoryview(note))
            receive(connection, memoryview(data))
            with self._changed:
                if attempt < self._attempt:
                    return {"error": "replaced"}
                self._parts[step, name] = Part(attempt, bytes(note), data)
        finally:
            with self._changed:
                self._arriving -= request["size"]
        return {}

    def _free(self, is_old: Any) -> list[bytearray]:
        """Drop the parts for which `is_old(key, part)` holds. Return the bytes of those that were copies."""
        freed = []
        for key in [key for key, part in self._parts.items() if is_old(key, part)]:
            part = self._parts.pop(key)
            part.free()
            if isinstance(part.data, bytearray):
                freed.append(part.data)
        return freed

    def _share(self, request: dict[str, Any], mine: list[Shared]) -> dict[str, Any]:
        """Open the memory of a process of this node."""
        opened: list[int] = []
        with self._changed:
            if request["attempt"] < self._attempt:
                return {"error": "replaced"}
            try:
                for file in request["files"]:
                    opened.append(os.open(f"/proc/{int(request['pid'])}/fd/{int(file)}", os.O_RDONLY))
            except OSError:  # another machine, another container, or another user
                for file in opened:
                    os.close(file)
                return {"error": "unshared"}
            shared = Shared(request["attempt"], list(zip(opened[::2], opened[1::2], strict=True)))
            if before := self._shared.pop(request["name"], None):
                before.free()
            self._shared[request["name"]] = shared
            mine.append(shared)
        return {}

    def _notes(self, wait: float) -> list[bytes]:
        """Return the notes of all parts, after the processes that share memory have ended, or after `wait` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not any(each.alive for each in self._shared.values()), wait)
            return [part.note for _, part in self._all()]

    def _all(self) -> Iterator[tuple[tuple[int, str], Part]]:
        yield from self._parts.items()
        for name, shared in self._shared.items():
            for step, part in shared.parts():
                yield (step, name), part

    def _read(self, request: dict[str, Any]) -> tuple[Any, ...]:
        step = request["step"]
        name = request["name"]
        with self._changed:
            restored, _, index_name, index = self._manifest
            if (step, name) == (restored, index_name):
                return {}, index[request["offset"] : request["offset"] + request["count"]]
            part = self._parts.get((step, name))
            if part is None and name in self._shared:
                part = next((part for at, part in self._shared[name].parts() if at == step), None)
            if part is None:
                return ({"error": "missing"},)
            return {}, part.read(request["offset"], request["count"])

    def _rewind(self, request: dict[str, Any], manifest: bytes, index: memoryview) -> None:
        """Forget what is after a step, and with a manifest all but that step. Refuse parts of earlier attempts.

        What the step needs of the memory of ranks stays open, and nothing that their writing processes do later counts.
        """
        step = request["step"]
        with self._changed:
            self._attempt = max(self._attempt, request["attempt"])
            for name in [name for name, each in self._shared.items() if each.attempt < self._attempt]:
                shared = self._shared.pop(name)
                for at, part in shared.parts():
                    if at <= step and not isinstance(part.data, bytearray) and (at, name) not in self._parts:
                        # The descriptor is duplicated, so the memory stays after `free`. The note is copied: a writing
                        # process that still lives may clear its file.
                        self._parts[at, name] = Part(part.attempt, part.note, os.dup(part.data))
                shared.free()
            self._free(lambda at, part: at[0] > step or (bool(manifest) and at[0] < step))
            self._manifest = (step, manifest, request["index"], index)


def weight_server(token: str, host: str) -> SnapshotServer:
    """Return a server for weights, which rollout workers of its node read. The model sets its size, not a limit.

    Args:
        token: that every request must carry.
        host: address to listen at.
    """
    return SnapshotServer(token, host, limit_bytes=sys.maxsize)


def main() -> None:
    """Serve until standard input ends, which happens when the parent exits."""
    settings = json.loads(sys.stdin.readline())
    print(SnapshotServer(**settings).address, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    main()

"""Snapshots in the memory of nodes, and the search for the newest commit among memory and the durable store."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.connections import Connections
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit, commit_folder, parse_manifest
from orchestrator.checkpoint.merging import merge_records
from orchestrator.checkpoint.retention import rewind
from orchestrator.checkpoint.snapshot_server import ERRNO
from orchestrator.config.errors import InputError
from orchestrator.storage.retry import Retry, read_stored

if TYPE_CHECKING:
    from orchestrator.checkpoint.reader import Reader

TIMEOUT = 10.0
"""Seconds for a server to answer."""
AT_ONCE = 16
"""Servers that are asked at the same time."""
LAST_WORDS = 1.0
"""Seconds to wait until the writing processes of ranks that died have finished their last snapshot."""
RETRY = Retry(attempts=2, first=0.05, deadline=TIMEOUT)
"""How often a read is tried. After it fails, the caller reads from the store."""
NOTE = {
    "step": int,
    "token": str,
    "writer": int,
    "writers": int,
    "attempt": int,
    "meta": dict,
    "record": dict,
}
"""The fields of a note, see `snapshot_writer`."""
LOCATION = "peer memory"
"""The name of the memory of nodes in messages."""


class PeerMemory:
    """A client of the snapshot servers of a run. Its methods are thread-safe and keep their connections.

    Attributes:
        location: for messages.
        skipped: the snapshots that the last call of `latest` passed over, and why.
    """

    location = LOCATION

    def __init__(self, token: str, servers: Sequence[str], timeout: float = TIMEOUT) -> None:
        """
        Args:
            token: the token that the servers were started with.
            servers: the addresses of all of them, nearest first.
            timeout: seconds for a server to answer.
        """
        self.skipped: list[tuple[int, str]] = []
        self._servers = list(servers)
        self._connections = Connections(token, timeout)
        self._places: dict[int, dict[str, list[str]]] = {}
        """The servers that hold each file, by step."""
        self._index = b""
        """The index file of the manifest that `latest` has returned."""
        self._last_read: tuple[str, int] = ("", 0)
        """Path and offset of the last read."""

    # -- reading

    def latest(self, at_most: int | None = None) -> CommitManifest | None:
        """Return the newest snapshot of which all parts are held; None without one.

        It waits shortly for the processes that write the snapshots of ranks that have just died.

        Raises:
            OSError: no server answers.
        """
        self.skipped = []
        notes, servers_of_file = self._notes()
        # Parts of one snapshot have one token. Two gangs may have made a snapshot of one step: the later attempt's
        # counts.
        for step, token in sorted(notes, key=lambda key: (key[0], notes[key][0]["attempt"]), reverse=True):
            parts = notes[step, token]
            if (at_most is not None and step > at_most) or len(parts) < parts[0]["writers"]:
                continue  # what is not whole was never finished
            meta: dict[str, Any] = next((part["meta"] for part in parts if part["writer"] == 0), {})
            try:
                commit, index = merge_records(
                    step, [part["record"] for part in parts], meta, f"{LOCATION}: step {step}"
                )
            except InputError as error:
                self.skipped.append((step, str(error)))
                continue
            self._places = {step: {name: servers_of_file[step, name] for name in commit.files}}
            self._index = index
            return commit
        return None

    def _notes(self) -> tuple[dict[tuple[int, str], list[dict[str, Any]]], dict[tuple[int, str], list[str]]]:
        """Return the notes by step and token, one of each writer; and the servers by step and file."""
        notes: dict[tuple[int, str], list[dict[str, Any]]] = {}
        servers_of_file: dict[tuple[int, str], list[str]] = {}
        answers = self._ask_all({"do": "notes", "wait": LAST_WORDS})
        for server, answer in zip(self._servers, answers, strict=True):
            for note in self._usable(server, answer["bytes"]) if answer else ():
                holders = servers_of_file.setdefault((note["step"], note["record"]["file"]), [])
                if not holders:
                    notes.setdefault((note["step"], note["token"]), []).append(note)
                holders.append(server)
        return notes, servers_of_file

    def _usable(self, server: str, answer: bytes) -> list[dict[str, Any]]:
        """Return the notes of a server that have the form of this version."""
        try:
            notes = list(json.loads(answer))
        except (ValueError, TypeError) as error:
            self.skipped.append((-1, f"the notes of {server} are unusable: {error}"))
            return []
        usable = []
        for note in notes:
            try:
                if all(isinstance(note[key], kind) for key, kind in NOTE.items()) and isinstance(
                    note["record"]["file"], str
                ):
                    usable.append(note)
                    continue
                step = int(note["step"])
            except (LookupError, TypeError, ValueError):
                step = -1
            self.skipped.append((step, f"a note of {server} is unusable"))
        return usable

    def manifest(self, step: int) -> CommitManifest:
        """Return the manifest of the snapshot that the run restores, see `rewind`. One server is asked.

        Raises:
            FileNotFoundError: the run does not restore this step from memory.
            OSError: no server answers.
        """
        error: OSError = FileNotFoundError(ERRNO["missing"], "no snapshot server has it")
        for server in self._servers:
            try:
                return self._parsed(step, self._connections.ask(server, {"do": "manifest", "step": step}))
            except OSError as failure:
                error = error if isinstance(failure, FileNotFoundError) else failure
        raise error

    def _parsed(self, step: int, answer: dict[str, Any]) -> CommitManifest:
        """Return the manifest in a server's answer. Raises OSError if it is unusable."""
        order = {address: number for number, address in enumerate(self._servers)}
        try:
            document = json.loads(answer["bytes"])
            manifest = parse_manifest(
                document["manifest"].encode(), f"{LOCATION}: step {step}", partial(self._read_index, step)
            )
            servers_of_file = {
                name: sorted(addresses, key=lambda address: order.get(address, len(order)))
                for name, addresses in document["places"].items()
            }
        except (LookupError, TypeError, ValueError, AttributeError, InputError, CorruptCommit) as error:
            raise OSError(errno.EBADMSG, f"its manifest is unusable: {error}") from None
        self._places = {step: servers_of_file | {manifest.index[0]: self._servers}}
        return manifest

    def reader(self, manifest: CommitManifest, durable: Store | None = None) -> Reader:
        """Return a reader of the tensors of a snapshot.

        Args:
            manifest: the snapshot, as `latest` or `manifest` returned it.
            durable: the store with the commit of the same step, which is read if memory lacks a part; None for none.
        """
        # imported here because it imports torch, which the process that writes snapshots must not load
        from orchestrator.checkpoint.reader import SnapshotReader

        return SnapshotReader(
            self, RETRY, commit_folder(manifest.step), manifest, partial(_stored, durable, manifest)
        )

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill `target` from a file of a snapshot. See `Backend.read_into`. The manifest says which servers have it.

        The same read once more, which a reader does after a wrong checksum, asks another server first. A server that
        gives too few bytes counts as one that has none.

        Args:
            path: folder of the commit and name of the file.
            offset: first byte in the file.
            target: as many bytes as are wanted.

        Raises:
            FileNotFoundError: every server that answers has lost the file.
            OSError: a server that may have it gives no answer.
        """
        folder, _, name = path.partition("/")
        (step, servers_of_file), *_ = self._places.items()
        servers = servers_of_file.get(name, []) if folder == commit_folder(step) else []
        if self._last_read == (path, offset):
            servers = servers[1:] + servers[:1]
        self._last_read = (path, offset)
        request = {"do": "read", "step": step, "name": name, "offset": offset, "count": len(target)}
        error: OSError = FileNotFoundError(ERRNO["missing"], "no snapshot server has it", path)
        for server in servers:
            try:
                if (size := int(self._connections.ask(server, request, target=target)["size"])) == len(
                    target
                ):
                    return size
            except OSError as failure:
                # A server without the file says nothing about a copy that cannot be reached now.
                error = error if isinstance(failure, FileNotFoundError) else failure
        raise error

    def _read_index(self, step: int, name: str, offset: int, target: memoryview) -> int:
        return read_stored(RETRY, self.read_into, f"{commit_folder(step)}/{name}", offset, target)

    # -- writing

    def share(self, server: str, name: str, attempt: int, files: Sequence[int]) -> bool:
        """Let this node's server open memory of this process, which it then holds when the process is gone.

        Args:
            server: the server of this node.
            name: the name of the part's file in every snapshot.
            attempt: the attempt of the run.
            files: file descriptors of this process: the memory and the note of each generation.

        Returns:
            Whether the server could open them. It counts this process as alive until its connection ends.
        """
        request = {"do": "share", "name": name, "attempt": attempt, "pid": os.getpid(), "files": list(files)}
        try:
            self._connections.ask(server, request)
        except OSError:
            return False
        return True

    def keep(
        self, server: str, *, step: int, name: str, attempt: int, complete: int, note: bytes, data: memoryview
    ) -> None:
        """Have a server keep a part of a snapshot, and forget this writer's parts of before `complete`.

        Raises:
            OSError: it does not answer, is full, or a later attempt of the run has begun.

        Args:
            server: address of the server.
            step: optimizer steps done.
            name: of the part's file.
            attempt: the attempt of the run.
            complete: the last step whose snapshot all writers have made.
            note: describes the part, see `snapshot_writer`.
            data: bytes of the part.
        """
        request = {
            "do": "keep", "step": step, "name": name, "attempt": attempt, "complete": complete, "note": len(note),
        }  # fmt: skip
        self._connections.ask(server, request, note, data)

    def rewind(self, step: int, attempt: int, manifest: CommitManifest | None = None) -> None:
        """Forget the snapshots after `step`, and refuse those of attempts before `attempt` from now on.

        Args:
            step: the step that the run goes on from.
            attempt: the attempt that starts there.
            manifest: what `latest` has returned, if the ranks are to restore it from memory. Only it is kept then.
        """
        document, index, name = b"", b"", ""
        if manifest is not None:
            text = manifest.to_bytes().decode()
            document = json.dumps({"manifest": text, "places": self._places[manifest.step]}).encode()
            index = self._index
            name, _ = manifest.index
        request = {"do": "rewind", "step": step, "attempt": attempt, "manifest": len(document), "index": name}
        self._ask_all(request, document, index)

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _ask_all(self, request: dict[str, Any], *buffers: bytes) -> list[dict[str, Any] | None]:
        """Return the answer of each server, None of one that cannot be reached. Raises the last error if none can."""
        errors: list[OSError] = [OSError("there are no snapshot servers")]

        def ask(server: str) -> dict[str, Any] | None:
            try:
                return self._connections.ask(server, request, *buffers)
            except OSError as error:
                errors.append(error)
                return None

        with ThreadPoolExecutor(min(AT_ONCE, len(self._servers)) or 1) as pool:
            answers = list(pool.map(ask, self._servers))
        if not any(answer is not None for answer in answers):
            raise errors[-1]
        return answers


def _stored(durable: Store | None, snapshot: CommitManifest) -> Reader | None:
    """Return a reader of the durable commit of the same state as a snapshot; None without one."""
    if durable is None:
        return None
    try:
        commit = durable.manifest(snapshot.step)
    except (CorruptCommit, InputError):
        return None
    return durable.reader(commit) if _state(commit) == _state(snapshot) else None


def _state(commit: CommitManifest) -> tuple[int, int, str, Any]:
    return commit.step, commit.position, commit.receipt, commit.meta.get("attempt")


def rewind_memory(
    peers: PeerMemory | None, step: int, attempt: int, manifest: CommitManifest | None = None
) -> None:
    """Call `PeerMemory.rewind`. Nodes that cannot be reached are left alone.

    Args:
        peers: the memory of peers, None without.
        step: the step that the run goes on from.
        attempt: the attempt that starts there.
        manifest: what the ranks are to restore from memory, see `PeerMemory.rewind`.
    """
    if peers is not None:
        with contextlib.suppress(OSError):
            peers.rewind(step, attempt, manifest)


def rewind_all(
    peers: PeerMemory | None, durable: Store, step: int, attempt: int, manifest: CommitManifest | None
) -> None:
    """Remove everything after `step` from memory, as `PeerMemory.rewind` does, and from the durable store.

    Args:
        peers: the memory of peers, None without.
        durable: the durable store.
        step: the step that the run goes on from.
        attempt: the attempt that starts there.
        manifest: what the ranks are to restore from memory, see `PeerMemory.rewind`.
    """
    rewind_memory(peers, step, attempt, manifest)
    rewind(durable, step)


def newest_commit(
    peers: PeerMemory | None, durable: Store, at_most: int | None = None
) -> tuple[CommitManifest, bool, list[str]] | None:
    """Return the newest sound commit of the memory of peers and of the durable store. Memory wins if both are as new.

    Only manifests and sizes are checked, because whoever loads the commit verifies each byte. Memory that cannot be
    reached is skipped.

    Args:
        peers: the memory of peers, None without.
        durable: the durable store.
        at_most: consider only this step and earlier ones.

    Returns:
        The manifest, whether it is one of memory, and a line for each commit or memory that was skipped; None without
        a sound commit.
    """
    result: CommitManifest | None = None
    notes: list[str] = []
    if peers is not None:
        try:
            result = peers.latest(at_most)
            notes += [f"{LOCATION}: step {step}: {why}" for step, why in peers.skipped]
        except OSError as error:
            notes.append(f"{LOCATION}: snapshots are gone or out of reach ({error})")
    stored = durable.latest(at_most, deep=False)
    notes += [f"{durable.location}: step {step}: {why}" for step, why in durable.skipped]
    if result is not None and (stored is None or result.step >= stored.step):
        return result, True, notes
    return None if stored is None else (stored, False, notes)

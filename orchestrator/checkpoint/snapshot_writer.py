"""One writer's part in each snapshot: its bytes stay in the memory of this node, and a copy goes to another node.

A note in JSON says where each piece of a tensor is in the bytes. Nobody gathers the notes while a run trains: whoever
looks for a snapshot does (`PeerMemory.latest`), and a snapshot is whole when every writer's note is there. The module
does not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.committer import CommitOutcome
from orchestrator.checkpoint.compact import PieceTable, block_sums
from orchestrator.checkpoint.peer_memory import LOCATION, PeerMemory
from orchestrator.checkpoint.snapshot_server import write_note
from orchestrator.config.errors import one_line

BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers."""

PieceEntry = Sequence[Any]
"""The name, dtype, shape, start, extent, offset and size of a piece, as `SharedBuffer.fill` returns them."""


@dataclass(frozen=True)
class Placement:
    """Where a writer's part of every snapshot is held.

    Attributes:
        token: the token of the servers.
        own: the address of this node's server, empty without one.
        other: the address of the server on another node that keeps a copy; empty if there is no other node.
        attempt: the attempt of the run.
        group: the same for all writers of a gang, and new with every start.
    """

    token: str
    own: str
    other: str
    attempt: int
    group: str


class SnapshotWriter:
    """Writer `writer` of `writers` that make the same snapshots."""

    def __init__(
        self, placement: Placement, writer: int, writers: int, generations: Sequence[tuple[int, int]]
    ) -> None:
        """
        Args:
            placement: where the parts are held.
            writer: this writer's number, from 0.
            writers: number of writers.
            generations: the file descriptors of each generation's memory and note.
        """
        self._name = f"shard-{writer:05d}-{placement.group}-0.safetensors"
        self._fixed = {
            "name": self._name,
            "attempt": placement.attempt,
            "token": placement.group,
            "writer": writer,
            "writers": writers,
        }
        self._attempt = placement.attempt
        self._pieces: Sequence[PieceEntry] = ()
        """The pieces of the last snapshot. Those of the next are the same object unless they have changed."""
        self._table = PieceTable(())
        self._notes = [note for _, note in generations]
        self._peers = PeerMemory(placement.token, [])
        self._copies_to = [placement.other] if placement.other else []
        files = [file for generation in generations for file in generation]
        is_shared = placement.own and self._peers.share(placement.own, self._name, placement.attempt, files)
        if placement.own and not is_shared:
            self._copies_to.append(placement.own)

    def save(
        self,
        step: int,
        generation: int,
        data: memoryview,
        pieces: Sequence[PieceEntry],
        *,
        meta: dict[str, Any],
        complete: int,
    ) -> CommitOutcome:
        """Describe the snapshot in this node's memory, and copy it to the other node.

        Never raises: the outcome says why it failed. Its seconds are those in which this thread computed.

        Args:
            step: optimizer steps done.
            generation: number of the memory that holds the pieces.
            data: that memory.
            pieces: where each piece is in it.
            meta: as in `Store.publish`. Only writer 0's is used.
            complete: the last step whose snapshot all writers have made; older ones may be forgotten.
        """
        began = time.thread_time()
        reason = ""
        try:
            note = json.dumps(
                self._fixed | {"step": step, "meta": meta, "record": self._record(data, pieces)}
            )
            encoded = note.encode()
            write_note(self._notes[generation], encoded)
            for server in self._copies_to:
                self._peers.keep(
                    server,
                    step=step,
                    name=self._name,
                    attempt=self._attempt,
                    complete=complete,
                    note=encoded,
                    data=data,
                )
        except Exception as error:
            reason = one_line(error)
        return CommitOutcome(
            step,
            LOCATION,
            state="failed" if reason else "written",
            seconds=time.thread_time() - began,
            bytes=len(data),
            reason=reason,
        )

    def _record(self, data: memoryview, pieces: Sequence[PieceEntry]) -> dict[str, Any]:
        """Return the record of the bytes as if they were a shard file, see `shard.file_content`."""
        if pieces is not self._pieces:
            entries = [
                ((name, dtype, tuple(shape)), start, extent, offset)
                for name, dtype, shape, start, extent, offset, _ in pieces
            ]
            self._pieces, self._table = pieces, PieceTable(entries)
        sums = b"".join(block_sums(data[offset : offset + size], BLOCK_BYTES) for *_, offset, size in pieces)
        return self._table.record(self._name, len(data), b"", BLOCK_BYTES, sums)

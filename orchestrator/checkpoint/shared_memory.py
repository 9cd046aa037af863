"""Shared host memory, which the trainer fills and the process that writes commits reads."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.snapshot_server import clear_note

ALIGN = 64
"""Each piece begins at a multiple of this many bytes."""


@contextlib.contextmanager
def _copying(on_device: bool) -> Iterator[None]:
    """Run the copies in the block on their own CUDA stream, after the work that is queued already, and wait for them.

    The step waits for these copies only, not for other streams, which may be reading the next batch.
    """
    if not on_device:
        yield
        return
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the one stream for all copies. Torch caches memory for each stream separately."""
    return torch.cuda.Stream(device)


def room_for(pieces: Iterable[TensorPiece]) -> tuple[int, bool]:
    """Return the bytes that these pieces take, and whether any piece is on a device."""
    size = 0
    on_device = False
    for piece in pieces:
        size += -(-piece.data.numel() * piece.data.element_size() // ALIGN) * ALIGN
        on_device = on_device or piece.data.is_cuda
    return size, on_device


def _forget_error() -> None:
    """Clear the error that CUDA keeps of a failed call. Otherwise the next kernel launch would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _anonymous_file() -> int:
    """Return the descriptor of a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedBuffer:
    """Memory for one save, in an anonymous file that grows as needed and is reused.

    Named shared memory would not do: it is limited to 64 MB in many containers and outlives a killed process.

    Attributes:
        fd: the file descriptor, which the writing process inherits.
        note: the file descriptor of a second file, in which the writing process describes the snapshot in the memory.
    """

    def __init__(self) -> None:
        self.fd = _anonymous_file()
        self.note = _anonymous_file()
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._filled_with: list[tuple[Any, ...]] = []
        """Name, dtype, shape and start of the pieces that have their places."""
        self._targets: list[torch.Tensor] = []
        """The place of each piece."""
        self._entries: list[tuple[Any, ...]] = []
        self._size = ALIGN

    def fill(self, pieces: Sequence[TensorPiece]) -> dict[str, Any]:
        """Copy the pieces in. Return the size and the place of each piece, for the writing process.

        From now on the memory holds no snapshot, until its note is written again.
        """
        clear_note(self.note)
        key = [(piece.name, piece.data.dtype, piece.data.shape, piece.start) for piece in pieces]
        if key != self._filled_with:
            self._arrange(pieces)
            self._filled_with = key
        with _copying(any(piece.data.is_cuda for piece in pieces)), torch.no_grad():
            if pieces:
                # One call for all pieces, of which a rank has thousands; `_copying` waits for the copies.
                torch._foreach_copy_(self._targets, [piece.data for piece in pieces], non_blocking=True)
        return {"bytes": self._size, "pieces": self._entries}

    def _arrange(self, pieces: Sequence[TensorPiece]) -> None:
        """Give each piece its place. The same pieces, which are saved after every step, keep theirs."""
        entries: list[tuple[Any, ...]] = []
        size = 0
        for piece in pieces:
            raw = piece.raw_with(memoryview(b""))
            count = piece.data.numel() * piece.data.element_size()
            entries.append((raw.name, raw.dtype, raw.shape, raw.start, raw.extent, size, count))
            size += -(-count // ALIGN) * ALIGN
        self._targets = []  # they keep the old memory alive
        self.make_room(size, any(piece.data.is_cuda for piece in pieces))
        self._targets = [
            self._bytes[at : at + count].view(piece.data.dtype).view(piece.data.shape)
            for piece, (*_, at, count) in zip(pieces, entries, strict=True)
        ]
        self._entries = entries
        self._size = max(size, ALIGN)

    def make_room(self, size: int, pin: bool) -> None:
        """Make room for `size` bytes, and `pin` the memory on request. The first time takes seconds.

        Args:
            size: bytes.
            pin: whether to lock the pages, for fast copies from the device.
        """
        self._grow(max(size, ALIGN), pin)

    def close(self) -> None:
        """Free the memory."""
        self._unpin()
        self._targets, self._filled_with = [], []
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        os.close(self.fd)
        os.close(self.note)

    def _grow(self, size: int, pin: bool) -> None:
        if size > len(self._bytes):
            self._unpin()
            self._targets, self._filled_with = [], []
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if pin and not self._pinned:
            # pinned memory makes copies from the device several times faster; a failure only makes them slow
            code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)
            self._pinned = int(code) == 0
            if not self._pinned:
                _forget_error()

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned = False

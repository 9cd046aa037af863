"""Shared host memory, which the trainer fills and the process that writes commits reads."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.snapshot_server import clear_note

ALIGN = 64
"""Each piece begins at a multiple of this many bytes."""


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
        self._to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Targets and sources on the CPU that `finish` copies."""
        self._queued: tuple[torch.cuda.Stream, list[torch.Tensor]] | None = None
        """The stream of copies from a device, and their sources, whose memory must not be used again before."""

    def fill(self, pieces: Sequence[TensorPiece]) -> dict[str, Any]:
        """Copy the pieces in. Return the size and the place of each piece, for the writing process."""
        request = self.begin(pieces)
        self.finish()
        return request

    def begin(self, pieces: Sequence[TensorPiece]) -> dict[str, Any]:
        """Begin to copy the pieces, which must not change until `finish` has returned. Return what `fill` does.

        Copies from a device are queued on a stream of their own, after the work that is queued already: the step goes
        on meanwhile. From now on the memory holds no snapshot, until its note is written again.
        """
        clear_note(self.note)
        key = [(piece.name, piece.data.dtype, piece.data.shape, piece.start) for piece in pieces]
        if key != self._filled_with:
            self._arrange(pieces)
            self._filled_with = key
        copies = [(target, piece.data.detach()) for target, piece in zip(self._targets, pieces, strict=True)]
        self._to_copy = [copy for copy in copies if not copy[1].is_cuda]
        on_device = [copy for copy in copies if copy[1].is_cuda]
        if on_device:
            stream = _stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            targets, sources = zip(*on_device, strict=True)
            # One call for all pieces, of which a rank has thousands.
            with torch.cuda.stream(stream), torch.no_grad():
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self._queued = stream, list(sources)
        return {"bytes": self._size, "pieces": self._entries}

    def finish(self) -> None:
        """Copy the pieces that are on the CPU, and wait for the copies from a device. May run in another thread."""
        if self._to_copy:
            targets, sources = zip(*self._to_copy, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
            self._to_copy = []
        if self._queued is not None:
            # Only this stream: others may be reading the next batch.
            self._queued[0].synchronize()
            self._queued = None

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

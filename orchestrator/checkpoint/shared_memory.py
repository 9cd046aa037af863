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


class SharedBuffer:
    """Memory for one save, in an anonymous file that grows as needed and is reused.

    Named shared memory would not do: it is limited to 64 MB in many containers and outlives a killed process.

    Attributes:
        fd: the file descriptor, which the writing process inherits.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def fill(self, pieces: Sequence[TensorPiece]) -> dict[str, Any]:
        """Copy the pieces in. Return the size and the offset of each piece, for the writing process."""
        entries: list[tuple[Any, ...]] = []
        size = 0
        for piece in pieces:
            raw = piece.raw_with(memoryview(b""))
            count = piece.data.numel() * piece.data.element_size()
            entries.append((raw.name, raw.dtype, raw.shape, raw.start, raw.extent, size, count))
            size += -(-count // ALIGN) * ALIGN
        on_device = any(piece.data.is_cuda for piece in pieces)
        self.make_room(size, on_device)
        with _copying(on_device):
            for piece, (*_, at, count) in zip(pieces, entries, strict=True):
                target = self._bytes[at : at + count].view(piece.data.dtype).view(piece.data.shape)
                target.copy_(piece.data.detach(), non_blocking=True)
        return {"bytes": max(size, ALIGN), "pieces": entries}

    def make_room(self, size: int, pin: bool) -> None:
        """Make room for `size` bytes, and `pin` the memory on request. The first time takes seconds."""
        self._grow(max(size, ALIGN), pin)

    def close(self) -> None:
        """Free the memory."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        os.close(self.fd)

    def _grow(self, size: int, pin: bool) -> None:
        if size > len(self._bytes):
            self._unpin()
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

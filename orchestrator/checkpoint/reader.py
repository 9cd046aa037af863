"""Read any slice of a commit's tensors. Only the blocks that hold it are read, and each is verified before use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol

import torch

from orchestrator.checkpoint.chunks import Box, Chunk
from orchestrator.checkpoint.compact import checksum
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit
from orchestrator.checkpoint.pieces import DTYPES
from orchestrator.checkpoint.shard import ITEM_BYTES
from orchestrator.config.errors import InputError
from orchestrator.storage.retry import LostBytes, Retry, read_stored


class ByteSource(Protocol):
    """What a reader reads from: storage, or the memory of nodes."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """See `Backend.read_into`.

        Args:
            path: of the file.
            offset: first byte in it.
            target: as many bytes as are wanted.
        """


class Reader:
    """Reads slices of the tensors of one commit.

    Attributes:
        manifest: the manifest of the commit.
        bytes_read: how many bytes have been read from storage.
    """

    def __init__(self, backend: ByteSource, retry: Retry, folder: str, manifest: CommitManifest) -> None:
        """Open a commit. Reads nothing yet.

        Args:
            backend: the files of the store.
            retry: repeats failed reads.
            folder: the folder of the commit in the store.
            manifest: the manifest of the commit.
        """
        self._backend = backend
        self._retry = retry
        self._folder = folder
        self.manifest = manifest
        self.bytes_read = 0

    def read(
        self, name: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor, on the CPU, in the stored dtype.

        Args:
            name: the name of the tensor.
            start: the offset of the slice for each dimension, the origin by default.
            shape: the shape of the slice, everything from `start` on by default.

        Raises:
            InputError: the tensor does not exist, or the slice reaches outside it.
            CorruptCommit: a checksum is wrong twice, bytes are missing or cannot be read, or the chunks of the tensor
                contradict the rest of the manifest.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise InputError(
                f"no tensor {name!r}", f"step {self.manifest.step}", "load it into the model that wrote it"
            )
        begin, extent = self._slice(name, entry.shape, start, shape)
        out = torch.empty(extent, dtype=DTYPES[entry.dtype])
        try:
            chunks = entry.chunks.overlapping((begin, extent))
        except InputError as error:
            raise CorruptCommit(f"step {self.manifest.step}: {error}") from None
        for chunk in chunks:
            part = _overlap((begin, extent), (chunk.start, chunk.shape))
            if part is not None:
                target = tuple(slice(at - b, at - b + n) for at, n, b in zip(*part, begin, strict=True))
                out[target] = self._part(name, chunk, part, entry.dtype)
        return out

    def _slice(
        self,
        name: str,
        full_shape: tuple[int, ...],
        start: tuple[int, ...] | None,
        shape: tuple[int, ...] | None,
    ) -> Box:
        begin = (0,) * len(full_shape) if start is None else tuple(start)
        extent = (
            tuple(n - at for n, at in zip(full_shape, begin, strict=False)) if shape is None else tuple(shape)
        )
        if not len(begin) == len(extent) == len(full_shape) or any(
            at < 0 or n < 0 or at + n > size for at, n, size in zip(begin, extent, full_shape, strict=True)
        ):
            raise InputError(
                f"{list(extent)} at {list(begin)} is no slice of {name} {list(full_shape)}",
                f"step {self.manifest.step}",
                "load it into the model that wrote it",
            )
        return begin, extent

    def _part(self, name: str, chunk: Chunk, part: Box, dtype: str) -> torch.Tensor:
        """Read the box `part` (start in the tensor, extent) from the chunk that contains it."""
        item, block = ITEM_BYTES[dtype], self.manifest.block_bytes
        local = tuple(at - b for at, b in zip(part[0], chunk.start, strict=True))
        strides = [math.prod(chunk.shape[d + 1 :]) for d in range(len(chunk.shape))]
        first = sum(at * stride for at, stride in zip(local, strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(part[1], strides, strict=True))
        size = math.prod(chunk.shape) * item
        # Only whole blocks are read, because each has one checksum. A block is a multiple of 16 bytes and so of every
        # element size: the division at the end is exact.
        base = first * item // block * block
        buffer = torch.empty(min((last * item // block + 1) * block, size) - base, dtype=torch.uint8)
        view = buffer.numpy().data
        for low, high in _block_ranges(part[1], strides, first, item, block):
            self._fill(name, chunk, view[low * block - base : high * block - base], low)
        # Strided by the whole chunk: the bytes between the blocks of the part were never read, and no element of it is
        # there.
        typed = buffer.view(DTYPES[dtype])
        return typed.as_strided(part[1], strides, first - base // item)

    def _fill(self, name: str, chunk: Chunk, target: memoryview, block: int) -> None:
        """Read full blocks into `target`, from number `block` on, and verify them. Read them again after a mismatch."""
        for last in (False, True):
            problem = self._read_blocks(chunk, target, block)
            if not problem:
                return
            if last:
                raise CorruptCommit(f"step {self.manifest.step}: {chunk.file}: {name}: {problem}")

    def _read_blocks(self, chunk: Chunk, target: memoryview, block: int) -> str:
        """Read and verify full blocks. Return what is wrong with them, empty if nothing is."""
        size = self.manifest.block_bytes
        path = f"{self._folder}/{chunk.file}"
        try:
            at = chunk.offset + block * size
            count = read_stored(self._retry, self._backend.read_into, path, at, target)
        except FileNotFoundError:
            return "the file is missing"
        except LostBytes as error:
            return f"the file cannot be read: {error.strerror}"
        self.bytes_read += count
        if count < len(target):
            return "the file is cut short"
        for number, at in enumerate(range(0, len(target), size), block):
            if checksum(target[at : at + size]) != chunk.blocks[number]:
                return f"block {number} at byte {chunk.offset + number * size} is damaged"
        return ""


class SnapshotReader(Reader):
    """Reads a snapshot from memory, and what memory does not give from the durable commit of the same step."""

    def __init__(
        self,
        memory: ByteSource,
        retry: Retry,
        folder: str,
        manifest: CommitManifest,
        durable: Callable[[], Reader | None],
    ) -> None:
        """`durable` opens the durable commit, and returns None without one; the others are as for `Reader`."""
        super().__init__(memory, retry, folder, manifest)
        self._open_durable = durable

    def read(
        self, name: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """See `Reader.read`.

        Args:
            name: the name of the tensor.
            start: the offset of the slice for each dimension, the origin by default.
            shape: the shape of the slice, everything from `start` on by default.
        """
        try:
            return super().read(name, start, shape)
        except (CorruptCommit, OSError):
            durable = self._durable
            if durable is None:
                raise
        return durable.read(name, start, shape)

    @cached_property
    def _durable(self) -> Reader | None:
        return self._open_durable()


def _overlap(first: Box, second: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    start = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    stop = [min(a + n, b + m) for a, n, b, m in zip(*first, *second, strict=True)]
    extent = tuple(end - at for at, end in zip(start, stop, strict=True))
    return (start, extent) if all(n > 0 for n in extent) else None


def _block_ranges(
    extent: tuple[int, ...], strides: list[int], first: int, item: int, block: int
) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of the blocks that hold a strided slice of a row-major chunk, adjacent ones merged."""
    depth = len(extent)
    while depth and (depth == len(extent) or extent[depth] * strides[depth] == strides[depth - 1]):
        depth -= 1
    # The dimensions from `depth` on are whole except for the first of them, so they are one run of bytes for each index
    # before them.
    run = math.prod(extent[depth:]) * item
    starts = [first]
    for n, stride in zip(extent[:depth], strides[:depth], strict=True):
        starts = [at + i * stride for at in starts for i in range(n)]
    low = high = first * item // block
    for at in starts:
        begin = at * item // block
        end = (at * item + run - 1) // block + 1
        if begin > high:
            yield low, high
            low = begin
        high = max(high, end)
    yield low, high

"""The bytes of one shard file: a safetensors file with a checksum for every block.

The module does not import torch, so the process that writes commits starts fast. It builds the header itself, because
the safetensors library writes complete files from `bytes` only. The library cannot stream from shared memory, write to
an object store, or compute checksums of ranges.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from orchestrator.checkpoint.compact import PieceTable, block_sums

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of an element, by the dtype names of the safetensors format."""


@dataclass(frozen=True)
class RawPiece:
    """A piece of a tensor as bytes. `shape` is that of the global tensor; `start` and `extent` locate `data` in it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    data: memoryview


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3_128 hash in 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def panels(piece: RawPiece, block_bytes: int) -> list[RawPiece]:
    """Split a large matrix along its last dimension into 2, 4 or 8 panels of at least a block each.

    A load under column-wise tensor parallelism then reads its own panels only. The writing process does this, not the
    trainer, because rearranging the bytes takes as long as copying them.

    Args:
        piece: of a tensor.
        block_bytes: bytes that one checksum covers.
    """
    last = piece.extent[-1] if len(piece.extent) > 1 else 0
    count = max(n for n in (1, 2, 4, 8) if n == 1 or (n <= len(piece.data) // block_bytes and n * 64 <= last))
    if count == 1:
        return [piece]
    import numpy as np  # a sixth of a second of each writing process, most of which cut nothing

    # [rows, last, bytes of an element]: numpy has no bf16 and no fp8, so elements are moved as bytes.
    rows = np.frombuffer(piece.data, np.uint8).reshape(-1, last, ITEM_BYTES[piece.dtype])
    edges = [last * number // count for number in range(count + 1)]
    return [
        RawPiece(
            piece.name,
            piece.dtype,
            shape=piece.shape,
            start=(*piece.start[:-1], piece.start[-1] + low),
            extent=(*piece.extent[:-1], high - low),
            data=np.ascontiguousarray(rows[:, low:high]).reshape(-1).data,
        )
        for low, high in itertools.pairwise(edges)
    ]


def group_pieces(pieces: Iterable[RawPiece], limit: int) -> Iterator[list[RawPiece]]:
    """Group pieces into files of at most `limit` bytes; a larger piece gets its own. A retry repeats one file.

    Args:
        pieces: of all tensors of a writer.
        limit: bytes of a file.
    """
    group: list[RawPiece] = []
    size = 0
    for piece in pieces:
        if group and size + len(piece.data) > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece.data)
    if group:
        yield group


def file_content(
    file: str, pieces: list[RawPiece], block_bytes: int
) -> tuple[list[bytes | memoryview], dict[str, Any]]:
    """Return the content of one safetensors file: its buffers in order, and its record for the manifest.

    Pieces with larger elements come first, so that every piece is aligned to its element size without padding.

    Args:
        file: name of the file, for its record.
        pieces: what it has.
        block_bytes: bytes that one checksum covers.

    Raises:
        ValueError: two pieces start at the same place, or bytes do not fit the extent.
    """
    ordered = sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype])
    index: dict[str, Any] = {}
    offsets: list[int] = []
    size = 0
    for piece in ordered:
        key = piece.name + "@" + ",".join(map(str, piece.start))
        if key in index:
            raise ValueError(f"{piece.name}: two pieces start at {list(piece.start)}")
        if math.prod(piece.extent) * ITEM_BYTES[piece.dtype] != len(piece.data):
            raise ValueError(
                f"{piece.name}: {len(piece.data)} bytes are not {piece.dtype} of {list(piece.extent)}"
            )
        index[key] = {
            "dtype": piece.dtype,
            "shape": list(piece.extent),
            "data_offsets": [size, size + len(piece.data)],
        }
        offsets.append(size)
        size += len(piece.data)
    text = json.dumps(index, separators=(",", ":")).encode()
    # Padded to 8 bytes, as the safetensors library does, so that the data after it are aligned for every dtype.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    entries = [
        ((piece.name, piece.dtype, tuple(piece.shape)), piece.start, piece.extent, len(header) + at)
        for piece, at in zip(ordered, offsets, strict=True)
    ]
    sums = b"".join(block_sums(piece.data, block_bytes) for piece in ordered)
    record = PieceTable(entries).record(file, len(header) + size, header, block_bytes, sums)
    return [header, *(piece.data for piece in ordered)], record

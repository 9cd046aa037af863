"""The compact form in which manifests and writers' records hold the chunks of tensors.

A table has a column for each number of a chunk: its tensor, its file, its offset in the file, and its start and extent
in each dimension. Its compact form is these columns as differences from chunk to chunk (int64, little-endian, zlib),
and then the checksums of all blocks of all chunks. Regular layouts repeat their differences, so a chunk takes little
more than its checksums. Writing a record needs no numpy, because most processes that write commits read none.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Sums = NDArray[np.uint8]

SUM_BYTES = 8
"""Bytes of the checksum of a block."""
FIXED = 3
"""Columns before the starts and the extents: tensor, file and offset."""
MOST_DIMENSIONS = 64
LARGEST = 1 << 60
"""Maximum of any size or offset, in bytes or elements."""
DENSEST = 1032
"""Bytes that a byte can inflate to, at most: a pair of bits for 258 equal bytes (RFC 1951)."""
LEVEL = 1
"""Compression level of zlib. Higher levels gain little on repeating differences."""

Kind = tuple[str, str, tuple[int, ...]]
"""The name, the dtype and the shape of a tensor."""


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """Return the first 8 bytes of the xxh3_128 hash."""
    return xxhash.xxh3_128_digest(data)[:SUM_BYTES]


def block_sums(data: memoryview, block_bytes: int) -> bytes:
    """Return the joined checksums of the blocks of `block_bytes`, so a part can be verified alone. The last may be
    shorter.

    Args:
        data: the bytes of a piece.
        block_bytes: bytes of a block; the last may be shorter.
    """
    return b"".join(checksum(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes))


def entry_of(chunks: int, dimensions: int, columns: bytes, sums: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the entry of a table, as JSON, and its compact form. `columns` are compressed already.

    Args:
        chunks: number of chunks.
        dimensions: of the tensor with the most.
        columns: the columns, compressed.
        sums: the joined checksums of all blocks.
    """
    data = columns + sums
    entry = {
        "chunks": chunks,
        "dimensions": dimensions,
        "blocks": len(sums) // SUM_BYTES,
        "bytes": len(data),
        "sum": checksum(data).hex(),
    }
    return entry, data


def pack(columns: Numbers, sums: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the entry and the compact form of a table with these columns, of shape (numbers, chunks).

    Args:
        columns: of shape (numbers, chunks).
        sums: the joined checksums of all blocks.
    """
    import numpy as np

    # Differences from chunk to chunk, one column after the other: those of a regular layout repeat, and zlib shortens
    # such runs to almost nothing.
    steps = np.diff(columns, axis=1, prepend=0).astype("<i8").tobytes()
    dimensions = (len(columns) - FIXED) // 2
    return entry_of(columns.shape[1], dimensions, zlib.compress(steps, LEVEL), sums)


def unpack(entry: dict[str, Any], data: bytes) -> tuple[Numbers, Sums]:
    """Return the columns of a table, of shape (numbers, chunks), and its checksums, of shape (blocks, SUM_BYTES).

    Args:
        entry: what `entry_of` has returned.
        data: the compact form. Its checksum is right.

    Raises:
        ValueError: the entry and the data contradict each other.
    """
    import numpy as np

    if len(data) != entry["bytes"]:
        raise ValueError(f"a table of {entry['bytes']} bytes has {len(data)}")
    chunks, dimensions, blocks = sizes_of(entry)
    numbers = FIXED + 2 * dimensions
    end = len(data) - blocks * SUM_BYTES
    inflate = zlib.decompressobj()
    size = 8 * chunks * numbers
    try:
        # One byte more than expected tells a table that is too long, without inflating all that a damaged one may
        # claim.
        steps = inflate.decompress(data[: max(end, 0)], size + 1)
    except zlib.error as error:
        raise ValueError(f"a table of chunks cannot be read: {error}") from None
    if end < 0 or len(steps) != size or not inflate.eof or inflate.unused_data:
        raise ValueError(f"the {len(data)} bytes of a table are not those of {chunks} chunks")
    columns = np.frombuffer(steps, "<i8").reshape(numbers, chunks).cumsum(axis=1, dtype=np.int64)
    sums = np.frombuffer(data, np.uint8, offset=end).reshape(blocks, SUM_BYTES)
    if chunks and not (int(columns.min()) >= 0 and int(columns.max()) <= LARGEST):
        raise ValueError("a chunk has numbers that are not sizes")
    return columns, sums


def sizes_of(entry: dict[str, Any]) -> tuple[int, int, int]:
    """Return the chunks, the dimensions and the blocks of a table from its entry. Raises ValueError."""
    chunks, dimensions, blocks, size = (entry[key] for key in ("chunks", "dimensions", "blocks", "bytes"))
    if not all(type(value) is int and 0 <= value <= LARGEST for value in (chunks, dimensions, blocks, size)):
        raise ValueError(f"{entry} has numbers that are not sizes")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"{dimensions} dimensions are more than a tensor has")
    if blocks * SUM_BYTES > size or 8 * chunks * (FIXED + 2 * dimensions) > DENSEST * size:
        raise ValueError(f"{size} bytes cannot hold a table of {chunks} chunks and {blocks} blocks")
    return chunks, dimensions, blocks


class PieceTable:
    """The part of a file's record that does not change with the bytes: tensors and places of its pieces.

    Attributes:
        tensors: name, dtype and shape of each tensor, compressed.
    """

    def __init__(self, pieces: Sequence[tuple[Kind, Sequence[int], Sequence[int], int]]) -> None:
        """`pieces` are the tensor, the start, the extent and the offset in the file of each piece, in order."""
        numbers: dict[Kind, int] = {}
        self._dimensions = max((len(start) for _, start, _, _ in pieces), default=0)
        rows = []
        for kind, start, extent, offset in pieces:
            padding = self._dimensions - len(start)
            # The file's number is 0: only who joins the records of all writers knows it.
            row = (numbers.setdefault(kind, len(numbers)), 0, offset)
            rows.append((*row, *start, *[0] * padding, *extent, *[1] * padding))
        steps = [b - a for column in zip(*rows, strict=True) for a, b in itertools.pairwise((0, *column))]
        self._columns = zlib.compress(struct.pack(f"<{len(steps)}q", *steps), LEVEL)
        self._chunks = len(rows)
        self.tensors = _text(zlib.compress(json.dumps([*numbers], separators=(",", ":")).encode(), LEVEL))

    def record(self, file: str, size: int, header: bytes, block_bytes: int, sums: bytes) -> dict[str, Any]:
        """Return the record of a file, as JSON, from which the manifest is made.

        Args:
            file: the name of the file.
            size: its bytes.
            header: its first bytes, which no piece covers.
            block_bytes: bytes of a piece that one checksum covers.
            sums: the checksums of all pieces, see `block_sums`.
        """
        entry, data = entry_of(self._chunks, self._dimensions, self._columns, sums)
        return {
            "file": file,
            "size": size,
            "header_bytes": len(header),
            "header": checksum(header).hex(),
            "block_bytes": block_bytes,
            "tensors": self.tensors,
            "table": entry | {"data": _text(data)},
        }


def tensors_of(text: str) -> list[Kind]:
    """Return the tensors of a record, see `PieceTable.tensors`."""
    document = json.loads(zlib.decompress(base64.b64decode(text)))
    return [(name, dtype, tuple(shape)) for name, dtype, shape in document]


def inline(entry: dict[str, Any]) -> bytes:
    """Return the compact form that an entry carries. Raises ValueError if its checksum is wrong."""
    data = base64.b64decode(entry["data"], validate=True)
    if checksum(data).hex() != entry["sum"]:
        raise ValueError("a table of chunks is damaged")
    return data


def with_data(entry: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return an entry that carries its compact form.

    Args:
        entry: of the table.
        data: its compact form.
    """
    return entry | {"data": _text(data)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()

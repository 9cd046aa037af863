"""Make the manifest of a commit from the records of its writers. All work on chunks is done in arrays."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.chunks import ChunkTable, ShardFiles
from orchestrator.checkpoint.compact import FIXED, Kind, checksum, inline, pack, tensors_of, unpack, with_data
from orchestrator.checkpoint.manifest import SCHEMA, CommitManifest, built, files_of
from orchestrator.checkpoint.shard import ITEM_BYTES
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from orchestrator.checkpoint.compact import Numbers, Sums

TABLE_CHUNKS = 1 << 16
"""Chunks of a table, after which the next tensor begins another: one read of half a megabyte."""
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, MemoryError, zlib.error)
"""The errors that a malformed record of a writer raises."""
INLINE_BYTES = 1 << 16
"""Bytes of all tables up to which the manifest has them itself, so that a small commit is one small file."""


def merge_records(
    step: int, records: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], where: str
) -> tuple[CommitManifest, bytes]:
    """Make and check the manifest of a commit.

    Args:
        step: optimiser steps done.
        records: the record of each shard file, see `compact.PieceTable`.
        meta: JSON with position and receipt.
        where: names the commit in messages.

    Returns:
        The manifest, and the content of the index file; empty if the manifest has all tables. The manifest reads its
        tables from there. The index file is named by its content, and in a store by `CommitManifest.with_index`.

    Raises:
        InputError: chunks overlap or leave holes, writers disagree, or `meta` lacks something.
    """
    other_meta = dict(meta)
    try:
        position = int(other_meta.pop("position"))
        receipt = str(other_meta.pop("receipt"))
        other_meta = json.loads(json.dumps(other_meta))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"meta is not usable: {error!r}", where, "pass JSON with position and receipt"
        ) from None
    try:
        sizes = {record["block_bytes"] for record in records}
        if len(sizes) > 1:
            hint = "open all stores with the same block size"
            raise InputError(f"writers used blocks of {sorted(sizes)} bytes", where, hint)
        block_bytes = sizes.pop() if sizes else 1 << 20
        listed = [[record[key] for key in ("file", "size", "header_bytes", "header")] for record in records]
        files = ShardFiles(files_of(listed), block_bytes)
        kinds, numbers = _kinds(records, where)
        columns, sums, blocks = _in_order(*_joined(records, kinds, numbers, block_bytes))
    except UNUSABLE as error:
        problem = f"the record of a writer is damaged ({type(error).__name__}): {error}"
        raise InputError(problem, where, "save again") from None
    tables = []
    index = []
    offset = 0
    for mine, numbers_of_table, sums_of_table in _tables(kinds, columns, sums, blocks):
        table_content = (numbers_of_table, sums_of_table)
        _ = ChunkTable(mine, files, where, lambda table_content=table_content: table_content).columns  # type: ignore[misc]  # checks it
        entry, data = pack(numbers_of_table, sums_of_table.tobytes())
        tables.append(entry | {"tensors": len(mine), "offset": offset})
        index.append(data)
        offset += len(data)
    document: dict[str, Any] = {
        "step": step,
        "position": position,
        "receipt": receipt,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "meta": other_meta,
        "block_bytes": block_bytes,
        "schema": SCHEMA,
        "files": listed,
        "tensors": [list(kind) for kind in kinds],
    }
    joined = b"".join(index)
    if len(joined) > INLINE_BYTES:
        document |= {"index": [f"index-0-{checksum(joined).hex()}.bin", len(joined)], "tables": tables}
    else:
        entries = [{key: value for key, value in entry.items() if key != "offset"} for entry in tables]
        document["tables"] = [with_data(*pair) for pair in zip(entries, index, strict=True)]
        joined = b""

    def read(name: str, at: int, target: memoryview) -> int:
        target[:] = joined[at : at + len(target)]
        return len(target)

    return built(document, where, read), joined


def _kinds(
    records: Sequence[Mapping[str, Any]], where: str
) -> tuple[list[Kind], dict[str, NDArray[np.int64]]]:
    """Return all tensors in the order of their names, and the numbers of each record's tensors by its text.

    Numbers in names count as numbers, so that the layers of a stage are neighbours. Many records have equal texts.
    """
    import numpy as np

    kinds: dict[str, Kind] = {}
    named: dict[str, list[str]] = {}
    for record in records:
        if (text := record["tensors"]) in named:
            continue
        named[text] = []
        for kind in tensors_of(text):
            if (before := kinds.setdefault(kind[0], kind)) != kind:
                problem = f"{kind[0]}: writers disagree: {before[1:]} and {kind[1:]}"
                raise InputError(problem, where, "save it alike")
            named[text].append(kind[0])
    order = sorted(kinds, key=_natural)
    number = {name: at for at, name in enumerate(order)}
    numbers = {text: np.array([number[name] for name in names], np.int64) for text, names in named.items()}
    return [kinds[name] for name in order], numbers


def _natural(name: str) -> list[Any]:
    """A key that sorts names by their texts and numbers in turn."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"([0-9]+)", name))]


def _joined(
    records: Sequence[Mapping[str, Any]],
    kinds: Sequence[Kind],
    numbers: Mapping[str, NDArray[np.int64]],
    block_bytes: int,
) -> tuple[Numbers, Sums, Numbers]:
    """Return the columns of all chunks, the checksums, and the number of checksums of each chunk.

    Raises ValueError or IndexError if a record contradicts itself.
    """
    import numpy as np

    dimensions = max((len(shape) for _, _, shape in kinds), default=0)
    tables = [unpack(record["table"], inline(record["table"])) for record in records]
    edges = np.cumsum([0, *(columns.shape[1] for columns, _ in tables)])
    joined = np.empty((FIXED + 2 * dimensions, int(edges[-1])), np.int64)
    joined[FIXED : FIXED + dimensions] = 0
    joined[FIXED + dimensions :] = 1
    for file, (record, (columns, _)) in enumerate(zip(records, tables, strict=True)):
        columns_of_file = joined[:, edges[file] : edges[file + 1]]
        its = (len(columns) - FIXED) // 2
        if its > dimensions:
            raise ValueError(f"{record['file']}: a chunk has more dimensions than its tensor")
        columns_of_file[0] = numbers[record["tensors"]][columns[0]]
        columns_of_file[1] = file
        columns_of_file[2] = columns[2]
        columns_of_file[FIXED : FIXED + its] = columns[FIXED : FIXED + its]
        columns_of_file[FIXED + dimensions : FIXED + dimensions + its] = columns[FIXED + its :]
    items = np.array([ITEM_BYTES.get(dtype, 1) for _, dtype, _ in kinds], np.int64)
    blocks = -(-(joined[FIXED + dimensions :].prod(axis=0) * items[joined[0]]) // block_bytes)
    ends = np.concatenate([np.zeros(1, np.int64), blocks.cumsum()])
    if (ends[edges] != np.cumsum([0, *(len(sums) for _, sums in tables)])).any():
        raise ValueError("it has another number of checksums than blocks")
    sums = np.concatenate([sums for _, sums in tables]) if tables else np.empty((0, 1), np.uint8)
    return joined, sums, blocks


def _in_order(columns: Numbers, sums: Sums, blocks: Numbers) -> tuple[Numbers, Sums, Numbers]:
    """Return what `_joined` returns, sorted by tensor and start."""
    import numpy as np

    dimensions = (len(columns) - FIXED) // 2
    # By tensor, then by start in each dimension. `lexsort` takes the most significant key last.
    order = np.lexsort([*columns[FIXED : FIXED + dimensions][::-1], columns[0]])
    # The checksums follow their chunks: those of chunk i are a run of blocks[i] rows, which moves as a whole.
    first = blocks.cumsum() - blocks
    counts = blocks[order]
    moved = np.repeat(first[order] - (counts.cumsum() - counts), counts) + np.arange(len(sums))
    return columns[:, order], sums[moved], counts


def _tables(
    kinds: Sequence[Kind], columns: Numbers, sums: Sums, blocks: Numbers
) -> Iterator[tuple[Sequence[Kind], Numbers, Sums]]:
    """Divide the chunks into tables: the tensors, the columns and the checksums of each."""
    import numpy as np

    dimensions = (len(columns) - FIXED) // 2
    ends = np.concatenate([np.zeros(1, np.int64), blocks.cumsum()])
    edges = np.searchsorted(columns[0], np.arange(len(kinds) + 1)).tolist()
    first = 0
    for after in range(1, len(kinds) + 1):
        if after < len(kinds) and edges[after] - edges[first] < TABLE_CHUNKS:
            continue
        low = edges[first]
        high = edges[after]
        mine = kinds[first:after]
        its = max(len(shape) for _, _, shape in mine)
        rows = [*range(FIXED + its), *range(FIXED + dimensions, FIXED + dimensions + its)]
        table = columns[rows, low:high]
        # Numbers of tensors count from the first tensor of the table, so each table is read alone.
        table[0] -= first
        yield mine, table, sums[int(ends[low]) : int(ends[high])]
        first = after

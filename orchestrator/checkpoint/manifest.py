"""The manifest of a commit: its tensors, where each byte of them is stored, and all checksums.

`manifest.json` ends with a checksum of the bytes before it, so a flipped bit anywhere is found. It has the files, the
tensors and the tables of chunks (`compact`): small ones themselves, others by their places in the commit's index file
and their checksums. Commits of earlier versions have the chunks in JSON. The module does not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.chunks import Chunks, ChunkTable, FileEntry, ShardFiles, TensorEntry
from orchestrator.checkpoint.compact import (
    FIXED,
    LARGEST,
    SUM_BYTES,
    Kind,
    checksum,
    inline,
    sizes_of,
    unpack,
)
from orchestrator.checkpoint.shard import ITEM_BYTES, digest
from orchestrator.config.errors import InputError
from orchestrator.storage.file_names import MANIFEST
from orchestrator.storage.retry import LostBytes

if TYPE_CHECKING:
    from orchestrator.checkpoint.compact import Numbers, Sums

SCHEMA = 2
JSON_CHUNKS = 1
"""The schema of earlier versions, with every chunk in JSON. It is read and copied, and no longer written."""
FILE_NAME = re.compile(r"shard-[0-9]{5,}-[0-9a-z]+-[0-9a-f]+\.safetensors")
INDEX_NAME = re.compile(r"index-[0-9a-z]+-[0-9a-f]+\.bin")
"""The name of the file with the tables of chunks that are not in the manifest."""
VERIFIED = "verified"
"""Key of a commit's meta: the last step that another rank has computed too, with equal results; 0 before the first."""
FOLDER = re.compile(r"step-([0-9]{8,})")
LARGE = 16 << 20
"""Bytes of a table for which memory is taken only if the index file is seen to have them."""
TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n')
TAIL_BYTES = len(b',"checksum":""}\n') + 32


def commit_folder(step: int) -> str:
    """Return the folder of the commit of a step."""
    return f"step-{step:08d}"


def published_steps(paths: Iterable[str]) -> list[int]:
    """Return the steps that have a manifest among `paths`."""
    folders = (path[: -len(MANIFEST) - 1] for path in paths if path.endswith("/" + MANIFEST))
    return [int(match[1]) for name in folders if (match := FOLDER.fullmatch(name))]


class CorruptCommit(Exception):
    """The stored bytes differ from the committed ones. The message names the part and the commit.

    Attributes:
        step: the step of the commit, -1 if unknown.
    """

    kind = "corrupt_commit"

    def __init__(self, what: str, step: int = -1) -> None:
        self.step = step
        super().__init__(what)


Span = tuple[int, int, bytes, str]
"""A range of bytes with a checksum: the first byte, the byte after the last, the checksum, and what it covers."""
ReadIndex = Callable[[str, int, memoryview], int]
"""Fills a buffer from an offset of a file of the commit, by name, and returns the bytes read."""


@dataclass(frozen=True)
class CommitManifest:
    """One commit.

    Attributes:
        step: optimiser steps done.
        position: samples consumed, counted over the whole run.
        receipt: rolling hash over the ids of all samples used.
        created: when it was published, in ISO format.
        meta: layout, engine, seed, identity of the job and other JSON values.
        block_bytes: size of a block; each block has a checksum.
        files: the shard files, by name.
        tensors: the global tensors, by name.
        tables: the tables that the chunks of the tensors are in.
        document: what the file has beside the fields above.
        schema: the version of this format.
    """

    step: int
    position: int
    receipt: str
    created: str
    meta: dict[str, Any]
    block_bytes: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry] = field(repr=False)
    tables: tuple[ChunkTable, ...] = field(repr=False, compare=False)
    document: dict[str, Any] = field(repr=False)
    schema: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def index(self) -> tuple[str, int]:
        """The name and the bytes of the index file; empty and 0 without one."""
        name, size = self.document.get("index", ("", 0))
        return name, size

    @property
    def file_sizes(self) -> dict[str, int]:
        """The bytes of every file beside the manifest, by name."""
        name, size = self.index
        return {name: entry.size for name, entry in self.files.items()} | ({name: size} if name else {})

    @property
    def index_ranges(self) -> list[Span]:
        """The tables in the index file, each with its checksum. Together they are the file."""
        ranges = []
        for table, entry in zip(self.tables, self.document.get("tables", ()), strict=False):
            if "offset" in entry:
                low = entry["offset"]
                label = f"the table of {table.kinds[0][0]} to {table.kinds[-1][0]}"
                ranges.append((low, low + entry["bytes"], bytes.fromhex(entry["sum"]), label))
        return ranges

    def wrong_files(self, sizes: Mapping[str, int]) -> list[str]:
        """Return a line for each file that is missing or has the wrong size. `sizes` has the stored files by path."""
        lines = []
        for name, expected in self.file_sizes.items():
            size = sizes.get(f"{commit_folder(self.step)}/{name}")
            if size is None:
                lines.append(f"{name} is missing")
            elif size != expected:
                lines.append(f"{name} has {size} bytes and should have {expected}")
        return lines

    def with_index(self, name: str) -> CommitManifest:
        """Return the manifest with this name of its index file."""
        return replace(self, document=self.document | {"index": [name, self.index[1]]})

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        named = ("step", "position", "receipt", "created", "meta", "block_bytes", "schema")
        content = self.document | {name: getattr(self, name) for name in named}
        body = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
        return body[:-1] + b',"checksum":"' + digest(body).encode() + b'"}\n'

    def __reduce__(self) -> tuple[Callable[..., CommitManifest], tuple[bytes, str]]:
        """Return how another process makes this manifest: from its file. Tables in an index file are not read there."""
        return parse_manifest, (self.to_bytes(), f"step {self.step}")

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], prefix: str = "model.") -> None:
        """Check that the commit belongs to this model.

        Args:
            shapes: global shapes of the model's tensors, by name.
            prefix: only tensors whose names start with this are compared.

        Raises:
            InputError: names up to three tensors that are missing, superfluous, or of another shape.
        """
        expected = {name: tuple(shape) for name, shape in shapes.items() if name.startswith(prefix)}
        stored = {name: entry.shape for name, entry in self.tensors.items() if name.startswith(prefix)}
        differ = [
            f"{name} is {list(stored[name]) if name in stored else 'missing'} and should be "
            f"{list(expected[name]) if name in expected else 'absent'}"
            for name in sorted(expected.keys() | stored.keys())
            if expected.get(name) != stored.get(name)
        ]
        if differ:
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            raise InputError(
                f"the commit is of another model: {', '.join(differ[:3])}{more}",
                f"step {self.step}",
                "use the model it was saved from, or another run name",
            )


def parse_manifest(raw: bytes, where: str, read: ReadIndex | None = None) -> CommitManifest:
    """Parse the content of a manifest.json. Its tables of chunks are read and checked when they are needed.

    Args:
        raw: the content.
        where: names the commit in messages.
        read: reads the commit's index file; None if that is not at hand.

    Raises:
        CorruptCommit: the bytes differ from those that were written.
        InputError: they do not differ, but this version cannot read them, or they contradict themselves.
    """
    tail = TAIL.fullmatch(raw[-TAIL_BYTES:])
    body = raw[:-TAIL_BYTES] + b"}"
    if tail is None or digest(body).encode() != tail[1]:
        raise CorruptCommit(f"{where}: the manifest is damaged or cut short ({MANIFEST})")
    try:
        data = json.loads(body)
        if data["schema"] > SCHEMA:
            raise InputError(
                f"schema {data['schema']} is newer than {SCHEMA}",
                where,
                "upgrade the orchestrator to read it",
            )
        if data["schema"] not in (SCHEMA, JSON_CHUNKS):
            raise ValueError(f"schema {data['schema']!r}")
        return built(data, where, read)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"not a manifest of this format ({type(error).__name__}: {error})", where, "use one"
        ) from None


def built(data: dict[str, Any], where: str, read: ReadIndex | None) -> CommitManifest:
    """Return the commit that a parsed manifest describes.

    Args:
        data: the parsed manifest.
        where: names the commit in messages.
        read: reads the commit's index file; None if that is not at hand.

    Raises:
        InputError: it contradicts itself.
        ValueError, KeyError, TypeError, AttributeError: it is not a manifest.
    """
    has_json_chunks = data["schema"] == JSON_CHUNKS
    step, position, block_bytes = _sizes([data["step"], data["position"], data["block_bytes"]])
    files = ShardFiles((_earlier_files if has_json_chunks else files_of)(data["files"]), block_bytes)
    kinds = (_earlier_kinds if has_json_chunks else _kinds)(data["tensors"])
    problem = _block_problem(block_bytes) or _file_problem(files.entries) or _kind_problem(kinds)
    if problem:
        raise InputError(problem, where, "do not use this commit")
    if has_json_chunks:
        load = partial(_earlier_chunks, kinds, files, data["tensors"])
        tables = [ChunkTable(kinds, files, where, load)] if kinds else []
        for table in tables:
            _ = table.columns  # it is here already, so it is checked at once
    else:
        tables = list(_tables(data, kinds, files, where, read))
    document: dict[str, Any] = {
        key: data[key] for key in ("files", "tensors", "tables", "index") if key in data
    }
    return CommitManifest(
        step,
        position,
        receipt=str(data["receipt"]),
        created=str(data["created"]),
        meta=dict(data["meta"]),
        block_bytes=block_bytes,
        files=files.entries,
        tensors={
            name: TensorEntry(shape, dtype, Chunks(table, number))
            for table in tables
            for number, (name, dtype, shape) in enumerate(table.kinds)
        },
        tables=tuple(tables),
        document=document,
        schema=data["schema"],
    )


def _sizes(values: Sequence[int]) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value <= LARGEST for value in values):
        raise ValueError(f"{values} are not sizes")
    return tuple(values)


def files_of(data: list[Any]) -> dict[str, FileEntry]:
    """Return the shard files by name, from the name, the bytes, the header's bytes and its checksum of each.

    Raises ValueError or TypeError if they are not.
    """
    result = {name: _file(size, header_bytes, header) for name, size, header_bytes, header in data}
    if len(result) != len(data):
        raise ValueError("a file is listed twice")
    return result


def _file(size: int, header_bytes: int, header: str) -> FileEntry:
    _sizes([size, header_bytes])
    return FileEntry(size, header_bytes, _sum(header))


def _kinds(data: list[Any]) -> list[Kind]:
    result = [(str(name), dtype, _sizes(shape)) for name, dtype, shape in data]
    if len({name for name, _, _ in result}) != len(result):
        raise ValueError("a tensor is listed twice")
    return result


def _sum(text: str) -> bytes:
    """A checksum, of which commits of earlier versions have twice as many bytes."""
    result = bytes.fromhex(text)[:SUM_BYTES]
    if len(result) < SUM_BYTES:
        raise ValueError(f"{text!r} is not a checksum")
    return result


def _earlier_files(data: dict[str, Any]) -> dict[str, FileEntry]:
    return {
        name: _file(entry["size"], entry["header_bytes"], entry["header"]) for name, entry in data.items()
    }


def _earlier_kinds(data: dict[str, Any]) -> list[Kind]:
    return [(name, entry["dtype"], _sizes(entry["shape"])) for name, entry in data.items()]


def _earlier_chunks(kinds: list[Kind], files: ShardFiles, data: dict[str, Any]) -> tuple[Numbers, Sums]:
    """Return the columns and the checksums of chunks in JSON, see `compact.unpack`."""
    import numpy as np

    number_of = {name: number for number, name in enumerate(files.names)}
    dimensions = max(len(shape) for _, _, shape in kinds)
    rows: list[tuple[int, ...]] = []
    sums: list[bytes] = []
    for tensor, (name, dtype, shape) in enumerate(kinds):
        if not data[name]["chunks"]:
            raise ValueError(f"{name}: chunks hold 0 of {math.prod(shape)} elements")
        for chunk in data[name]["chunks"]:
            if chunk["file"] not in number_of:
                raise ValueError(f"{name}: {chunk['file']!r} is not a shard of this commit")
            offset, *start = _sizes([chunk["offset"], *chunk["start"]])
            extent = _sizes(chunk["shape"])
            size = math.prod(extent) * ITEM_BYTES[dtype]
            if len(chunk["blocks"]) != -(-size // files.block_bytes):
                raise ValueError(f"{name}: {len(chunk['blocks'])} checksums for {size} bytes")
            if not len(start) == len(extent) == len(shape):
                raise ValueError(f"{name}: a chunk of {list(extent)} at {start} in a tensor of {list(shape)}")
            padding = dimensions - len(shape)
            row = (tensor, number_of[chunk["file"]], offset)
            rows.append((*row, *start, *[0] * padding, *extent, *[1] * padding))
            sums += map(_sum, chunk["blocks"])
    columns = np.array(rows, np.int64).reshape(len(rows), FIXED + 2 * dimensions).T
    return columns, np.frombuffer(b"".join(sums), np.uint8).reshape(-1, SUM_BYTES)


def _tables(
    data: dict[str, Any], kinds: list[Kind], files: ShardFiles, where: str, read: ReadIndex | None
) -> Iterable[ChunkTable]:
    """Yield the tables of a manifest. Arguments as for `parse_manifest`."""
    index, size = data.get("index", ("", 0))
    if index and (not INDEX_NAME.fullmatch(index) or _sizes([size]) != (size,)):
        raise ValueError(f"{index!r} is not the index of this commit")
    first = 0
    for entry in data["tables"]:
        sizes_of(entry)
        _sum(entry["sum"])
        (count,) = _sizes([entry["tensors"]])
        if not count or ("data" not in entry and not index):
            raise ValueError("a table of chunks without tensors, or without bytes")
        mine = kinds[first : first + count]
        if "data" in entry:
            load = partial(_inline, entry)
        else:
            if sum(_sizes([entry["offset"], entry["bytes"]])) > size:
                raise ValueError(f"a table of chunks is beyond the {size} bytes of {index}")
            description = (
                f"{where}: the chunks of {mine[0][0]} to {mine[-1][0]} in {index}" if mine else where
            )
            load = partial(_indexed, entry, index, read, description)
        yield ChunkTable(mine, files, where, load)
        first += count
    if first != len(kinds):
        raise ValueError(f"tables have {first} of {len(kinds)} tensors")


def _inline(entry: dict[str, Any]) -> tuple[Numbers, Sums]:
    return unpack(entry, inline(entry))


def _indexed(entry: dict[str, Any], index: str, read: ReadIndex | None, name: str) -> tuple[Numbers, Sums]:
    """Read a table from the index file, once more after a wrong checksum. `name` names it in messages.

    Raises:
        CorruptCommit: its bytes are missing or damaged.
    """
    problem = "are not at hand"
    for _ in range(2 if read else 0):
        assert read is not None
        try:
            # The last byte first: a damaged entry may claim gigabytes, which are not allocated for a file that has no
            # such byte.
            if entry["bytes"] > LARGE and not _has_byte(read, index, entry["offset"] + entry["bytes"] - 1):
                problem = "are cut short"
                continue
            target = bytearray(entry["bytes"])
            count = read(index, entry["offset"], memoryview(target))
        except FileNotFoundError:
            problem = "are missing"
            break
        except LostBytes as error:
            problem = f"cannot be read: {error.strerror}"
            break
        if count == len(target) and checksum(target).hex() == entry["sum"]:
            return unpack(entry, bytes(target))
        problem = "are cut short" if count < len(target) else "are damaged"
    raise CorruptCommit(f"{name} {problem}")


def _has_byte(read: ReadIndex, index: str, offset: int) -> bool:
    """Whether the index file has a byte at `offset`."""
    return read(index, offset, memoryview(bytearray(1))) == 1


def _block_problem(block_bytes: int) -> str:
    if block_bytes < 16 or block_bytes % 16:
        return f"blocks of {block_bytes} bytes are not a multiple of 16"
    return ""


def _file_problem(files: Mapping[str, FileEntry]) -> str:
    """Return what is wrong with the entry of a file; empty if nothing is."""
    for name, file in files.items():
        if not FILE_NAME.fullmatch(name):
            return f"{name!r} is not a shard of this folder"
        if file.header_bytes > file.size:
            return f"{name}: the header is larger than the file"
    return ""


def _kind_problem(kinds: Sequence[Kind]) -> str:
    """Return which tensor cannot be one; empty if all can."""
    for name, dtype, shape in kinds:
        if dtype not in ITEM_BYTES:
            return f"{name}: unknown dtype {dtype!r}"
        if math.prod(shape) * ITEM_BYTES[dtype] > LARGEST:
            return f"{name}: {list(shape)} are not sizes"
    return ""

"""The manifest of a commit: its tensors, where each byte of them is stored, and all checksums.

The file is JSON and ends with a checksum of the bytes before it, so a flipped bit anywhere is found. The module does
not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.checkpoint.shard import ITEM_BYTES, digest
from orchestrator.config.errors import InputError
from orchestrator.storage.file_names import MANIFEST


def tiling_problem(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Return why boxes (start, extent) do not tile `shape` exactly; empty if they do.

    Boxes tile the shape if they lie inside it, do not overlap, and their volumes add up to its volume. A sweep over the
    first dimension avoids comparing all pairs.
    """
    for start, extent in boxes:
        if not len(start) == len(extent) == len(shape):
            return f"a chunk of {list(extent)} at {list(start)} in a tensor of {list(shape)}"
        if any(at + size > whole for at, size, whole in zip(start, extent, shape, strict=True)):
            return f"a chunk of {list(extent)} at {list(start)} reaches outside {list(shape)}"
    volume = sum(math.prod(extent) for _, extent in boxes)
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, extent in sorted(box for box in boxes if math.prod(box[1])):
        open_boxes = [box for box in open_boxes if not shape or box[0][0] + box[1][0] > start[0]]
        for other, size in open_boxes:
            spans = zip(start, extent, other, size, strict=True)
            if all(a < b + lb and b < a + la for a, la, b, lb in spans):
                return f"chunks at {list(other)} and {list(start)} overlap"
        open_boxes.append((start, extent))
    if volume != math.prod(shape) or not boxes:
        return f"chunks hold {volume} of {math.prod(shape)} elements"
    return ""


SCHEMA = 1
LARGEST = 1 << 60  # of any size or offset
FILE_NAME = re.compile(r"shard-[0-9]{5,}-[0-9a-z]+-[0-9a-f]+\.safetensors")
VERIFIED = "verified"
"""Key of a commit's meta: the last step that another rank has computed too, with equal results; 0 before the first."""
FOLDER = re.compile(r"step-([0-9]{8,})")
TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n')
TAIL_BYTES = len(b',"checksum":""}\n') + 32


def commit_folder(step: int) -> str:
    """Return the folder of the commit of a step."""
    return f"step-{step:08d}"


def published_steps(paths: Iterable[str]) -> list[int]:
    """Return the steps that have a manifest among `paths`."""
    folders = (path[: -len(MANIFEST) - 1] for path in paths if path.endswith("/" + MANIFEST))
    return [int(found[1]) for name in folders if (found := FOLDER.fullmatch(name))]


class CorruptCommit(Exception):
    """The stored bytes differ from the committed ones. The message names the part and the commit.

    Attributes:
        step: the step of the commit, -1 if unknown.
    """

    kind = "corrupt_commit"

    def __init__(self, what: str, step: int = -1) -> None:
        self.step = step
        super().__init__(what)


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, which is stored contiguously in one file."""

    file: str
    offset: int
    """The first byte in the file."""
    start: tuple[int, ...]
    """The offset of the box in the tensor, for each dimension."""
    shape: tuple[int, ...]
    """The extent of the box."""
    blocks: tuple[str, ...]
    """The checksum of each block."""


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor: its shape, its dtype by safetensors' name, and the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileEntry:
    """A shard file: its size in bytes, and the size and checksum of its header. Chunks cover the rest."""

    size: int
    header_bytes: int
    header: str


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
        schema: the version of this format.
    """

    step: int
    position: int
    receipt: str
    created: str
    meta: dict[str, Any]
    block_bytes: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    schema: int = field(default=SCHEMA)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(entry.size for entry in self.files.values())

    def wrong_files(self, sizes: Mapping[str, int]) -> list[str]:
        """Return a line for each file that is missing or has the wrong size. `sizes` has the stored files by path."""
        lines = []
        for name, entry in self.files.items():
            size = sizes.get(f"{commit_folder(self.step)}/{name}")
            if size is None:
                lines.append(f"{name} is missing")
            elif size != entry.size:
                lines.append(f"{name} has {size} bytes and should have {entry.size}")
        return lines

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        body = json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()
        return body[:-1] + b',"checksum":"' + digest(body).encode() + b'"}\n'

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], prefix: str = "model.") -> None:
        """Check that the commit belongs to this model.

        Args:
            shapes: global shapes of the model's tensors, by name.
            prefix: only tensors whose names start with this are compared.

        Raises:
            InputError: names up to three tensors that are missing, superfluous, or of another shape.
        """
        wanted = {name: tuple(shape) for name, shape in shapes.items() if name.startswith(prefix)}
        held = {name: entry.shape for name, entry in self.tensors.items() if name.startswith(prefix)}
        differ = [
            f"{name} is {list(held[name]) if name in held else 'missing'} and should be "
            f"{list(wanted[name]) if name in wanted else 'absent'}"
            for name in sorted(wanted.keys() | held.keys())
            if wanted.get(name) != held.get(name)
        ]
        if differ:
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            raise InputError(
                f"the commit is of another model: {', '.join(differ[:3])}{more}",
                f"step {self.step}",
                "use the model it was saved from, or another run name",
            )


def parse_manifest(raw: bytes, where: str) -> CommitManifest:
    """Parse the content of a manifest.json; `where` is for messages.

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
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        manifest = _build(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"not a manifest of this format ({type(error).__name__}: {error})", where, "use one"
        ) from None
    check_manifest(manifest, where)
    return manifest


def _build(data: dict[str, Any]) -> CommitManifest:
    def ints(values: list[int]) -> tuple[int, ...]:
        if not all(type(value) is int and 0 <= value <= LARGEST for value in values):
            raise ValueError(f"{values} are not sizes")
        return tuple(values)

    def chunk(entry: dict[str, Any]) -> Chunk:
        (offset,) = ints([entry["offset"]])
        return Chunk(
            str(entry["file"]),
            offset,
            ints(entry["start"]),
            ints(entry["shape"]),
            tuple(map(str, entry["blocks"])),
        )

    def file(entry: dict[str, Any]) -> FileEntry:
        size, header_bytes = ints([entry["size"], entry["header_bytes"]])
        return FileEntry(size, header_bytes, str(entry["header"]))

    tensors = {
        name: TensorEntry(ints(entry["shape"]), entry["dtype"], tuple(map(chunk, entry["chunks"])))
        for name, entry in data["tensors"].items()
    }
    step, position, block_bytes = ints([data["step"], data["position"], data["block_bytes"]])
    return CommitManifest(
        step,
        position,
        receipt=str(data["receipt"]),
        created=str(data["created"]),
        meta=dict(data["meta"]),
        block_bytes=block_bytes,
        files={name: file(entry) for name, entry in data["files"].items()},
        tensors=tensors,
        schema=data["schema"],
    )


def check_manifest(manifest: CommitManifest, where: str) -> None:
    """Check that a manifest does not contradict itself and names only files of its own folder.

    Raises:
        InputError: it does not hold.
    """
    problem = ""
    if manifest.block_bytes < 16 or manifest.block_bytes % 16:
        problem = f"blocks of {manifest.block_bytes} bytes are not a multiple of 16"
    problem = problem or _file_problem(manifest) or _tensor_problem(manifest)
    if problem:
        raise InputError(problem, where, "do not use this commit")


def _file_problem(manifest: CommitManifest) -> str:
    """Return what is wrong with the entry of a file; empty if nothing is."""
    for name, file in manifest.files.items():
        if not FILE_NAME.fullmatch(name):
            return f"{name!r} is not a shard of this folder"
        if file.header_bytes > file.size:
            return f"{name}: the header is larger than the file"
    return ""


def _tensor_problem(manifest: CommitManifest) -> str:
    """Return why a tensor cannot be read from the files; empty if all can."""
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            return f"{name}: unknown dtype {tensor.dtype!r}"
        for chunk in tensor.chunks:
            if chunk.file not in manifest.files:
                return f"{name}: {chunk.file!r} is not a shard of this commit"
            size = math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
            if chunk.offset + size > manifest.files[chunk.file].size:
                return f"{name}: its {size} bytes at {chunk.offset} are more than {chunk.file} holds"
            if len(chunk.blocks) != -(-size // manifest.block_bytes):
                return f"{name}: {len(chunk.blocks)} checksums for {size} bytes"
        if problem := tiling_problem(tensor.shape, [(chunk.start, chunk.shape) for chunk in tensor.chunks]):
            return f"{name}: {problem}"
    return ""

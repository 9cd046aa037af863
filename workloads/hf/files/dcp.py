"""Folders of torch.distributed.checkpoint (DCP): tensors are read in parts and written one at a time."""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.files.plain_pickle import Strided, dcp_metadata, strided
from workloads.hf.files.weight_names import METADATA
from workloads.model.stored import Part

SUFFIX = ".distcp"
_LOCAL_HEADER = struct.Struct("<26xHH")
"""The header of a file in a zip archive: the lengths of its name and of the extra field before its data."""


@dataclass(frozen=True)
class _Chunk:
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


class DcpTensors:
    """The tensors in `folder` by their names there. Nothing is unpickled: see `plain_pickle`.

    Raises WorkloadError if the folder cannot be read. Non-tensors (counters, generators, loaders) are skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries = _entries(folder)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of a tensor, on the CPU in its own dtype, without reading the rest."""
        entry = self._entries[name]
        out = torch.empty([wanted.stop - wanted.start for wanted in part], dtype=entry.dtype)
        filled = 0
        for chunk in entry.chunks:
            low = [max(wanted.start, at) for wanted, at in zip(part, chunk.start, strict=True)]
            high = [
                min(wanted.stop, at + n) for wanted, at, n in zip(part, chunk.start, chunk.shape, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            in_chunk = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, chunk.start, strict=True))
            in_out = tuple(
                slice(a - wanted.start, b - wanted.start)
                for a, b, wanted in zip(low, high, part, strict=True)
            )
            out[in_out] = _piece(self._folder / chunk.file, chunk, in_chunk)
            filled += math.prod(b - a for a, b in zip(low, high, strict=True))
        if filled != out.numel():
            raise WorkloadError(f"{self._folder} lacks a part of {name}; copy the files of all ranks there")
        return out


def _entries(folder: Path) -> dict[str, _Entry]:
    where = f"{folder / METADATA}"
    try:
        data = (folder / METADATA).read_bytes()
    except OSError as error:
        raise WorkloadError(f"{where} cannot be read ({error.strerror})") from None
    metadata = dcp_metadata(data, where)
    try:
        offsets = {index: getattr(index, "offset", None) for index in metadata.storage_data}
        files = {(i.fqn, tuple(at)): metadata.storage_data[i] for i, at in offsets.items() if at is not None}
        tensors = {name: t for name, t in metadata.state_dict_metadata.items() if hasattr(t, "chunks")}
        return {name: _entry(name, tensor, files) for name, tensor in tensors.items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise WorkloadError(
            f"{where} is not as torch.distributed.checkpoint writes it ({type(error).__name__}: {error}); "
            "save it with torch's own file system writer"
        ) from None


def _entry(name: str, tensor: Any, files: Mapping[tuple[str, tuple[int, ...]], Any]) -> _Entry:
    chunks = []
    for chunk in tensor.chunks:
        info = files[name, tuple(chunk.offsets)]
        file = info.relative_path
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise WorkloadError(f"the metadata has {name} outside its folder, at {file}; do not use it")
        if getattr(info, "transform_descriptors", None):
            raise WorkloadError(f"{name} is stored in compressed form; save it without extensions")
        chunks.append(_Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, info.offset, info.length))
    dtype = tensor.properties.values[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has the type {dtype!r}")
    return _Entry(tuple(tensor.size), dtype, tuple(chunks))


def _piece(path: Path, chunk: _Chunk, part: Part) -> Tensor:
    """Return a part of one chunk, reading only the pages that contain it."""
    try:
        with path.open("rb") as file, _mapped(file.fileno(), chunk) as memory:
            about, begin = _opened(str(path), chunk.offset, chunk.length)
            first = about.offset + sum(
                wanted.start * stride for wanted, stride in zip(part, about.stride, strict=True)
            )
            extent = tuple(wanted.stop - wanted.start for wanted in part)
            last = first + sum((n - 1) * stride for n, stride in zip(extent, about.stride, strict=True))
            if about.size != chunk.shape or last >= about.count:
                raise WorkloadError(f"{path} holds another tensor than its metadata says; copy it again")
            item = about.dtype.itemsize
            base = _base(chunk.offset)
            strides = [stride * item for stride in about.stride]
            values = np.ndarray(extent, f"u{item}", memory, begin + first * item - base, strides)
            return torch.from_numpy(values.copy()).view(about.dtype)
    except (
        OSError,
        ValueError,
        TypeError,
        OverflowError,
        KeyError,
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        raise WorkloadError(f"{path} cannot be read ({error}); copy it again") from None


@contextlib.contextmanager
def _mapped(fd: int, chunk: _Chunk) -> Iterator[mmap.mmap]:
    base = _base(chunk.offset)
    with mmap.mmap(fd, chunk.offset - base + chunk.length, access=mmap.ACCESS_READ, offset=base) as memory:
        yield memory


def _base(offset: int) -> int:
    """Return the byte at or before this one from which a file can be mapped."""
    return offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY


@lru_cache(maxsize=4096)
def _opened(path: str, offset: int, length: int) -> tuple[Strided, int]:
    """Return the layout of the tensor that torch.save wrote there, and the byte of the file at which its storage
    begins.
    """
    with open(path, "rb") as file:
        view = _View(file, offset, length)
        with zipfile.ZipFile(view) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
                raise WorkloadError(f"{path} is compressed, which torch.save does not do; copy it again")
            if "byteorder" in entries and archive.read(entries["byteorder"]).decode() != sys.byteorder:
                raise WorkloadError(f"{path} is of a machine with another byte order; convert it there")
            about = strided(archive.read(entries["data.pkl"]), path)
            data = entries["data/0"]
            if data.file_size != about.count * about.dtype.itemsize:
                raise WorkloadError(
                    f"{path} holds a tensor that is not stored plainly; save it with torch.save"
                )
        view.seek(data.header_offset)
        name, extra = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
        return about, offset + data.header_offset + _LOCAL_HEADER.size + name + extra


class _View:
    """A section of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a byte of the section."""
        self._at = at + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._at

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` bytes, all by default."""
        left = max(0, self._length - self._at)
        count = left if count is None or count < 0 else min(count, left)
        self._file.seek(self._offset + self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data


def write_dcp(shapes: Mapping[str, torch.Size], read: Callable[[str], Tensor], folder: str) -> None:
    """Write tensors as `torch.distributed.checkpoint.save` does, so that its `load` reads them into a state dict with
    these names.

    `read(name)` returns an fp32 tensor. Only one is in memory at a time.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    class Planner(dcp.DefaultSavePlanner):
        """Reads a tensor when it is written."""

        def lookup_object(self, index: MetadataIndex) -> Tensor:
            """Return the tensor to write next."""
            return read(index.fqn)

    class Writer(dcp.FileSystemWriter):
        """Keeps the location out of the metadata, because it is a draft's folder."""

        def storage_meta(self) -> StorageMeta:
            """Return nothing."""
            return StorageMeta()

    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    # Nothing is copied ahead: tensors are written in the plan's order, and one is in memory.
    writer = Writer(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process writes
        dcp.save(blank, storage_writer=writer, planner=Planner(), no_dist=True)

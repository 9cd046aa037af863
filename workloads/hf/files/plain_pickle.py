"""Read pickles as plain data: none of their code runs, and anything unexpected is refused."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from workloads.errors import WorkloadError

_DCP_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
    "torch.distributed.checkpoint.planner",
    "olmo_core.distributed.checkpoint.filesystem",
    "megatron.core.dist_checkpointing.strategies.torch",
}
_DCP_CLASSES = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix",
    "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData", "MCoreMetadata", "MCoreSavePlan",
}  # fmt: skip
_OTHERS = {
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    ("pathlib", "WindowsPath"), ("pathlib._local", "WindowsPath"), ("pathlib", "PurePosixPath"),
}  # fmt: skip
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Record:
    """An object of a pickle: the values of its attributes, without its class."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Take the attributes. `values` are those of a class that stores them without names."""
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})


@dataclass(frozen=True)
class Strided:
    """The layout of a stored tensor in its storage, in elements, not bytes."""

    dtype: torch.dtype
    count: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def dcp_metadata(data: bytes, where: str) -> Any:
    """Return the `.metadata` of a torch.distributed.checkpoint folder as records.

    Raises WorkloadError if it is something else, or needs anything but that module's classes.
    """
    metadata = _loaded(_Metadata(io.BytesIO(data)), where)
    if not isinstance(metadata, Record) or not hasattr(metadata, "state_dict_metadata"):
        raise WorkloadError(
            f"{where} is not metadata of torch.distributed.checkpoint; give a folder that it wrote"
        )
    return metadata


def strided(data: bytes, where: str) -> Strided:
    """Return what `torch.save` recorded about one tensor. Raises WorkloadError for any other content."""
    tensor = _loaded(_Tensor(io.BytesIO(data)), where)
    if not isinstance(tensor, Strided):
        raise WorkloadError(
            f"{where} holds something other than a plain tensor; save it again with torch's own writer"
        )
    return tensor


def _loaded(unpickler: pickle.Unpickler, where: str) -> Any:
    try:
        return unpickler.load()
    except WorkloadError as error:
        raise WorkloadError(f"{where} {error}") from None
    except Exception as error:  # damaged pickles may raise any error
        raise WorkloadError(
            f"{where} cannot be read ({type(error).__name__}: {error}); copy it again"
        ) from None


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class of DCP's metadata."""
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module in _DCP_MODULES and name in _DCP_CLASSES) or (module, name) in _OTHERS:
            return Record
        raise WorkloadError(
            f"asks for {module}.{name}, which no metadata of torch.distributed.checkpoint needs, and nothing was run; "
            "do not use files from this source"
        )


class _Tensor(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a constituent of a saved tensor."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _noted
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        raise WorkloadError(
            f"asks for {module}.{name}, which no plain tensor needs, and nothing was run; save it as plain tensors"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Return the dtype and the number of elements of a storage."""
        _, dtype, _, _, count = pid
        return dtype, count


def _noted(storage: tuple[torch.dtype, int], offset: int, size: Any, stride: Any, *_: Any) -> Strided:
    return Strided(storage[0], storage[1], offset, tuple(size), tuple(stride))

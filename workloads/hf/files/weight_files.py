"""The tensors of a checkpoint folder: read one at a time or in parts, and written as safetensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.files.compressed_weights import Expanded
from workloads.hf.files.dcp import DcpTensors
from workloads.hf.files.mxfp4 import Unpacked
from workloads.hf.files.name_maps import places
from workloads.hf.files.weight_names import INDEX, METADATA, SINGLE, config_of, file_of, shards_of
from workloads.hf.tables.families import by_model_type
from workloads.model.stored import Part

SHARD_BYTES = 5_000_000_000
"""Maximum bytes of an export's file, as in transformers."""


class Weights:
    """The checkpoint in `folder`: safetensors, or torch.distributed.checkpoint with transformers' names.

    MXFP4 is read as bf16, other quantised weights in the dtype of their scales.

    Pickled code never runs. Raises WorkloadError if the folder has neither, or if its files cannot be read.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        self._source: Expanded | _Dcp
        if (file := file_of(path)) is not None:
            self._source = Expanded(Unpacked(_Safetensors(path, file)))
        elif (path / METADATA).exists():
            self._source = _Dcp(path)
        else:
            raise WorkloadError(f"{folder} has no {SINGLE}; convert the checkpoint to safetensors")
        self._stored = {_modern(name): name for name in self._source.names}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` on CPU in its own dtype."""
        return self._source.part(self._stored[name], tuple(slice(0, n) for n in self.shape(name)))

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of the tensor `name`, on CPU in its own dtype, without reading the rest."""
        return self._source.part(self._stored[name], part)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._stored)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the tensor `name`."""
        return torch.Size(self._source.shapes[self._stored[name]])

    def blank(self, name: str) -> Tensor:
        """Return a tensor of the same shape on the meta device."""
        return torch.empty(self.shape(name), device="meta")


class _Safetensors:
    """One file, or several with an index. All tensors in them count, as in transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        for part in shards_of(folder / name) if name.endswith(".json") else [name]:
            with self._open(part) as file:
                self._files |= dict.fromkeys(file.keys(), part)
        self.names = list(self._files)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """Open one of the files. Raises WorkloadError if it cannot be read."""
        try:
            with safe_open(self._folder / name, "pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise WorkloadError(f"{self._folder / name} cannot be read ({error})") from None

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of a tensor."""
        with self._open(self._files[name]) as file:
            if not part:
                scalar: Tensor = file.get_tensor(name)
                return scalar
            values: Tensor = file.get_slice(name)[part]
            return values.clone()  # without this, the whole file stays mapped

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor."""
        shapes: dict[str, list[int]] = {}
        for file_name in sorted(set(self._files.values())):
            with self._open(file_name) as file:
                names = [name for name in file.keys() if self._files[name] == file_name]  # noqa: SIM118
                shapes |= {name: file.get_slice(name).get_shape() for name in names}
        return shapes


class _Dcp:
    """A folder of torch.distributed.checkpoint with the model's config.json in it, with the names of transformers or of
    another project.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors = DcpTensors(folder)
        config = config_of(folder)
        family = by_model_type(str(config.get("model_type")))
        tokens = (
            next((row.hf_name for row in family.rows if row.names == ("tokens.weight",)), "")
            if family
            else ""
        )
        self._places = places(self._tensors.shapes, config, tokens)
        self.names = list(self._places)
        self.shapes = {
            name: self._tensors.shapes[stored.name][0 if stored.expert is None else 1 :]
            for name, stored in self._places.items()
        }

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of a tensor."""
        source = self._places[name]
        if source.expert is not None:
            return self._tensors.part(source.name, (slice(source.expert, source.expert + 1), *part))[0]
        if not source.head:
            return self._tensors.part(source.name, part)
        stored, order = source.rows(range(part[0].start, part[0].stop))
        return self._tensors.part(source.name, (slice(stored.start, stored.stop), *part[1:]))[order]


def _modern(name: str) -> str:
    """Return the modern name of a tensor. Checkpoints converted from TensorFlow call a norm's weight and bias gamma
    and beta.
    """
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def write(tensors: Iterable[tuple[str, Tensor]], folder: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `tensors` as model.safetensors, or as numbered files with an index if they exceed `shard_bytes`."""
    shards: list[dict[str, Tensor]] = [{}]
    files: list[Path] = []
    size = total = 0
    target = Path(folder)

    def flush() -> None:
        files.append(target / f"shard-{len(files)}.tmp")
        save_file(shards[-1], files[-1], metadata={"format": "pt"})
        names.append(list(shards[-1]))
        shards[-1] = {}

    names: list[list[str]] = []
    for name, tensor in tensors:
        amount = tensor.numel() * tensor.element_size()
        if shards[-1] and size + amount > shard_bytes:
            flush()
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size = size + amount
        total = total + amount
    flush()
    if len(files) == 1:
        files[0].rename(target / SINGLE)
        return
    index: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(target / final)
        index |= dict.fromkeys(names[number - 1], final)
    (target / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    )

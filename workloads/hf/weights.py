"""The tensors of a checkpoint folder: read one at a time, or part by part, and written as safetensors."""

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
from workloads.hf.dcp import METADATA, DcpTensors
from workloads.hf.families import by_model_type
from workloads.hf.hf_config import FOLDER, root
from workloads.hf.mxfp4 import Unpacked
from workloads.hf.name_maps import places
from workloads.model.stored import Part

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SHARD_BYTES = 5_000_000_000
"""Most bytes of a file of an export, as in transformers."""


class Weights:
    """The checkpoint in `folder`: safetensors, MXFP4 read as bf16, or of torch.distributed.checkpoint by the names of
    transformers. No pickle runs anything.

    Raises WorkloadError if the folder has neither, or if its files cannot be read.
    """

    def __init__(self, folder: str) -> None:
        place = Path(folder)
        self._source: Unpacked | _Dcp
        if any((place / name).exists() for name in (SINGLE, INDEX)):
            self._source = Unpacked(_Safetensors(place))
        elif (place / METADATA).exists():
            self._source = _Dcp(place)
        else:
            raise WorkloadError(f"{folder} has no {SINGLE}; convert the checkpoint to safetensors")
        self._stored = {_modern(name): name for name in self._source.names}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """The tensor `name` on CPU in its own dtype."""
        return self._source.part(self._stored[name], tuple(slice(0, n) for n in self.shape(name)))

    def part(self, name: str, part: Part) -> Tensor:
        """A part of the tensor `name`, on CPU in its own dtype; the rest of it is not read."""
        return self._source.part(self._stored[name], part)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._stored)

    def shape(self, name: str) -> torch.Size:
        """The shape of the tensor `name`."""
        return torch.Size(self._source.shapes[self._stored[name]])

    def blank(self, name: str) -> Tensor:
        """A tensor of the same shape on the meta device."""
        return torch.empty(self.shape(name), device="meta")


class _Safetensors:
    """One file, or several with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if (folder / INDEX).exists():
            self._files = _files_of(folder / INDEX)
        else:
            with self._open(SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), SINGLE)
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
        """A part of a tensor."""
        with self._open(self._files[name]) as file:
            if not part:
                scalar: Tensor = file.get_tensor(name)
                return scalar
            found: Tensor = file.get_slice(name)[part]
            return found.clone()  # else it keeps the whole file mapped

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """The shape of each tensor."""
        found: dict[str, list[int]] = {}
        for file_name in sorted(set(self._files.values())):
            with self._open(file_name) as file:
                found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return found


class _Dcp:
    """A folder of torch.distributed.checkpoint beside the model's config.json, with the names of transformers or of
    another project."""

    def __init__(self, folder: Path) -> None:
        self._tensors = DcpTensors(folder)
        config = _config_of(folder)
        family = by_model_type(str(config.get("model_type")))
        tokens = (
            next((row.hf_name for row in family.rows if row.names == ("tokens.weight",)), "")
            if family
            else ""
        )
        self._places = places(self._tensors.shapes, config, tokens)
        self.names = list(self._places)
        self.shapes = {
            name: self._tensors.shapes[place.name][0 if place.expert is None else 1 :]
            for name, place in self._places.items()
        }

    def part(self, name: str, part: Part) -> Tensor:
        """A part of a tensor."""
        place = self._places[name]
        if place.expert is not None:
            return self._tensors.part(place.name, (slice(place.expert, place.expert + 1), *part))[0]
        if not place.head:
            return self._tensors.part(place.name, part)
        stored, order = place.rows(range(part[0].start, part[0].stop))
        return self._tensors.part(place.name, (slice(stored.start, stored.stop), *part[1:]))[order]


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{folder / 'config.json'} cannot be read ({error})") from None
    return found if isinstance(found, dict) else {}


def _files_of(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{index} is no index of weights ({type(error).__name__}: {error})") from None


def _modern(name: str) -> str:
    """The present name of a tensor: checkpoints converted from TensorFlow call a norm's weight and bias gamma, beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def has_weights(folder: str) -> bool:
    """Whether `folder` holds a checkpoint, as `Weights` reads it. Raises WorkloadError if only a pickled one."""
    if any((Path(folder) / name).exists() for name in (SINGLE, INDEX, METADATA)):
        return True
    if pickled := next((name for name in PICKLED if (Path(folder) / name).exists()), None):
        raise WorkloadError(
            f"{folder} has its weights in {pickled}, and nothing is unpickled here; "
            "convert the checkpoint to safetensors"
        )
    return False


def check_of_class(folder: str) -> None:
    """Raise WorkloadError if the weights in `folder` cannot be read by a class of transformers that is run as it is."""
    if has_weights(folder) and not any((Path(folder) / name).exists() for name in (SINGLE, INDEX)):
        raise WorkloadError(
            f"{folder} has weights of torch.distributed.checkpoint, and its class is run as that of transformers; "
            "convert them to safetensors"
        )


def weights_of_model(model: str) -> str | None:
    """The folder with the weights of the model `hf:<folder>`; None for a preset, and for a configuration alone. Raises
    WorkloadError as `has_weights` does."""
    if not model.startswith(FOLDER):
        return None
    folder = str(root(model.removeprefix(FOLDER)))
    return folder if has_weights(folder) else None


def write(tensors: Iterable[tuple[str, Tensor]], folder: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `tensors` as model.safetensors, or as numbered files with an index if they exceed `shard_bytes`."""
    shards: list[dict[str, Tensor]] = [{}]
    files: list[Path] = []
    size = total = 0
    place = Path(folder)

    def flush() -> None:
        files.append(place / f"shard-{len(files)}.tmp")
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
        size, total = size + amount, total + amount
    flush()
    if len(files) == 1:
        files[0].rename(place / SINGLE)
        return
    index: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(place / final)
        index |= dict.fromkeys(names[number - 1], final)
    (place / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))

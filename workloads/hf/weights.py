"""The tensors of a safetensors checkpoint folder: read one at a time, and written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.hf_config import FOLDER, root

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SHARD_BYTES = 5_000_000_000
"""Most bytes of a file of an export, as in transformers."""


class Weights:
    """The checkpoint in `folder`. Nothing is unpickled.

    Raises WorkloadError if the folder has no safetensors files, or if they cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        if (self.folder / INDEX).exists():
            self._files = _files_of(self.folder / INDEX)
        elif (self.folder / SINGLE).exists():
            with self._open(SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise WorkloadError(f"{folder} has no {SINGLE}; convert the checkpoint to safetensors")
        self._stored = {_modern(name): name for name in self._files}

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """Open one of the files. Raises WorkloadError if it cannot be read."""
        try:
            with safe_open(self.folder / name, "pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise WorkloadError(f"{self.folder / name} cannot be read ({error})") from None

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """The tensor `name` on CPU in its own dtype."""
        stored = self._stored[name]
        with self._open(self._files[stored]) as file:
            return file.get_tensor(stored)

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A part of the tensor `name`, on CPU in its own dtype; the rest of it is not read."""
        stored = self._stored[name]
        with self._open(self._files[stored]) as file:
            found: Tensor = file.get_slice(stored)[part]
            return found.clone()  # else it keeps the whole file mapped

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._stored)

    def blank(self, name: str) -> Tensor:
        """A tensor of the same shape on the meta device."""
        return torch.empty(self._shapes[self._stored[name]], device="meta")

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for file_name in sorted(set(self._files.values())):
            with self._open(file_name) as file:
                found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return found


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
    """Whether `folder` holds a safetensors checkpoint. Raises WorkloadError if it holds only a pickled one."""
    if any((Path(folder) / name).exists() for name in (SINGLE, INDEX)):
        return True
    if pickled := next((name for name in PICKLED if (Path(folder) / name).exists()), None):
        raise WorkloadError(
            f"{folder} has its weights in {pickled}, and nothing is unpickled here; "
            "convert the checkpoint to safetensors"
        )
    return False


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

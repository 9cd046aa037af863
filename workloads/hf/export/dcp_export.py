"""Export as a folder of torch.distributed.checkpoint, with the tensor names of transformers or of another project."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.files.dcp import write_dcp
from workloads.hf.files.hf_config import GENERATOR
from workloads.hf.files.name_maps import Stored, to_pairs, written
from workloads.hf.files.weight_files import Weights

Names: TypeAlias = Literal["hf", "torchtitan", "olmo"]


def export_dcp(plain: str, folder: str, names: Names) -> None:
    """Write the export in `plain` to `folder`, in a form that torch's `load` reads and that a run may start from.

    The configuration and the tokenizer are written beside the weights. Raises WorkloadError if `names` has no name
    for a tensor, RuntimeError if a tensor reads back differently.
    """
    if (Path(plain) / GENERATOR).exists():
        raise WorkloadError(
            "a generator and its discriminator have no common names; export them for transformers"
        )
    source = Weights(plain)
    config = json.loads((Path(plain) / "config.json").read_text())
    stored = {name: Stored((name,)) for name in source.names}
    if names != "hf":
        stored = written(names, source.names, config)

    def read(name: str) -> Tensor:
        made = stored[name]
        if made.stacked:
            return torch.stack([source.read(expert) for expert in made.names])
        return to_pairs(source.read(made.names[0]), made.head)

    def shape(made: Stored) -> torch.Size:
        each = source.shape(made.names[0])
        return torch.Size((len(made.names), *each)) if made.stacked else each

    write_dcp({name: shape(made) for name, made in stored.items()}, read, folder)
    copy_others(plain, folder)
    tensors = Weights(folder)
    for name in source.names:
        if name not in tensors or not torch.equal(tensors.read(name), source.read(name)):
            raise RuntimeError(
                f"{name} has other values in the export than in the checkpoint; nothing was published"
            )


def copy_others(plain: str, folder: str) -> None:
    """Copy the files besides the weights."""
    for path in Path(plain).iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, Path(folder) / path.name)

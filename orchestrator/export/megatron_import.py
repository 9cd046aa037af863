"""Take the weights out of a sharded checkpoint that Megatron-LM wrote (`--ckpt-format torch`): one file of each rank of
tensor and pipeline parallelism.

The files are pickles, and are read by torch's own reader of weights alone. Of other objects only those are made that
are plain data: the options of the run, arrays of a generator's state; a class of Megatron's becomes an inert
placeholder, and whatever else is asked for is refused.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.export.megatron_names import Options, canonical, merged, options_of
from orchestrator.job.errors import InputError
from workloads.errors import WorkloadError
from workloads.hf.weights import write

LATEST = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
DATA: Mapping[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "numpy._core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "_codecs.encode": lambda text, _: text.encode("latin1"),
}
"""What is plain data among what torch's reader does not know: options, and the arrays of a generator's state."""
OURS = ("megatron.", "transformer_engine.")
"""Packages whose classes, of which options have a few, become placeholders."""
AGAIN = "give the folder that --save named, or one iter_... of it"


@dataclass(frozen=True)
class Shards:
    """The models of all ranks, by tensor and pipeline rank, and the options that they were trained with."""

    folder: Path
    models: Mapping[tuple[int, int], Mapping[str, Tensor]]
    options: Options
    iteration: int


class Placeholder:
    """Stands for an object of Megatron's: takes whatever it is made with, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Take nothing."""


def import_megatron(
    source: str, target: str, iteration: int | None = None, vocabulary: int | None = None
) -> dict[str, Any]:
    """Write `target`/model.safetensors and config.json of GPT-2 or Llama as transformers has them, so that the folder
    is trained as `hf:<target>`. Weights keep their type; optimiser state is not imported.

    vocabulary: rows of the tables that are kept; by default all, with those that Megatron adds to divide them. Returns
    {"iteration", "tensor_parallel", "pipeline_parallel", "version", "model_type", "tensors"}, the last by name with
    their shapes. Raises InputError if the folder is no such checkpoint, or is of a model that neither class computes.
    """
    out = Path(target)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("the target is not empty", target, "name a new folder")
    folder = _folder(Path(source), iteration)
    try:
        shards = _read(folder)
        config, tensors = merged(shards.models, shards.options, vocabulary)
    except WorkloadError as error:
        raise InputError(str(error), str(folder), "") from None
    out.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write(iter(tensors.items()), str(out))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {
        "iteration": shards.iteration,
        "tensor_parallel": 1 + max(tp for tp, _ in shards.models),
        "pipeline_parallel": 1 + max(pp for _, pp in shards.models),
        "version": shards.options.version,
        "model_type": config["model_type"],
        "tensors": shapes,
    }


def _folder(source: Path, iteration: int | None) -> Path:
    """The folder of one iteration."""
    if iteration is None and (source / LATEST).is_file():
        found = (source / LATEST).read_text().strip()
        folder = source / (found if found == "release" else f"iter_{int(found):07d}")
    else:
        folder = source if iteration is None else source / f"iter_{iteration:07d}"
    if not any(RANK.fullmatch(path.name) for path in folder.glob("mp_rank_*")):
        raise InputError("there is no checkpoint of Megatron-LM (mp_rank_...)", str(folder), AGAIN)
    return folder


def _read(folder: Path) -> Shards:
    models: dict[tuple[int, int], Mapping[str, Tensor]] = {}
    first: dict[str, Any] = {}
    for rank, path in sorted(_files(folder)):
        stored = _load(path)
        if "model" not in stored:
            virtual = "model0" in stored
            what = (
                "has several pipeline stages a rank, which are not put together"
                if virtual
                else "has no model"
            )
            raise WorkloadError(
                f"{path.name} of {path.parent.name} {what}; save it again without virtual stages"
            )
        models[rank], first = canonical(stored["model"]), first or stored
    if "args" not in first:
        raise WorkloadError(
            "its files hold no options (args), without which its layout is not known; save it again"
        )
    options = options_of(vars(first["args"]), float(first.get("checkpoint_version", 0.0)))
    wanted = {(tp, pp) for tp in range(options.tensor) for pp in range(options.pipeline)}
    if lacking := sorted(wanted - models.keys()):
        tp, pp = lacking[0]
        raise WorkloadError(
            f"the file of tensor-parallel rank {tp} and pipeline rank {pp} is missing, of {len(wanted)}; copy all"
        )
    return Shards(folder, {rank: models[rank] for rank in wanted}, options, int(first.get("iteration", 0)))


def _files(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    for path in folder.iterdir():
        if found := RANK.fullmatch(path.name):
            place = next((path / name for name in FILES if (path / name).is_file()), None)
            if place is None:
                raise WorkloadError(f"{path.name} has no {FILES[0]}; copy it again")
            yield (int(found[1]), int(found[2] or 0)), place


def _load(path: Path) -> dict[str, Any]:
    """What is in a file, its tensors not read yet."""
    where = f"{path.parent.name}/{path.name}"
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:  # a damaged file ends in any error
        raise WorkloadError(f"{where} is no file of torch.save ({_line(error)}); copy it again") from None
    allowed: list[Any] = [type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + np.typecodes["Float"]]
    for name in asked:
        if name in DATA:
            allowed.append((DATA[name], name))
        elif name.startswith(OURS):
            allowed.append((type("Placeholder", (Placeholder,), {}), name))
        else:
            raise WorkloadError(
                f"{where} asks for {name}, which is no plain data, and nothing was run; do not use what is from there"
            )
    with torch.serialization.safe_globals(allowed):
        read = partial(torch.load, str(path), map_location="cpu", weights_only=True)
        try:
            found = read(mmap=True)
        except Exception as error:  # a damaged file ends in any error
            raise WorkloadError(f"{where} cannot be read ({_line(error)}); copy it again") from None
    if not isinstance(found, dict):
        raise WorkloadError(f"{where} holds no checkpoint of Megatron-LM; {AGAIN}")
    return found


def _line(error: Exception) -> str:
    """The reason alone: torch adds advice on how to load what is not plain."""
    reason = str(error).rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    return " ".join(f"{type(error).__name__}: {reason}".split())[:160]

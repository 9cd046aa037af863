"""Which files of a folder hold its weights. Imports no torch, because a controller asks too."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FOLDER, check_no_adapter, root

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NAMED = "transformers_weights"
"""The key of a config.json that names the file of the weights, or their index."""
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files of transformers' own sharded training, which it prefers to all others."""
UNREAD = re.compile(
    r"(?!adapter_model).+\.(safetensors|gguf|h5|msgpack)|(pytorch_model|consolidated).*\.(bin|pt|pth)(\.index\.json)?"
)
"""Names of weight files that are not read, unless they are the file or the shards that `Weights` looks for."""
METADATA = ".metadata"
"""The file with which torch.distributed.checkpoint describes a folder."""


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; empty without one. Raises WorkloadError if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{folder / 'config.json'} cannot be read ({error})") from None
    return config if isinstance(config, dict) else {}


def file_of(folder: Path) -> str | None:
    """Return the name of the safetensors file, or of the index of several, that transformers reads in `folder`.

    This is the one that the configuration names, else a single whole file, else an index. An index beside a whole
    file is a leftover of an earlier save. Raises WorkloadError if the configuration names a file that is not in the
    folder.
    """
    named = config_of(folder).get(NAMED)
    if named is None:
        return next((name for name in (SINGLE, INDEX) if (folder / name).exists()), None)
    here = os.path.abspath(folder)  # links are not followed, because a Hub cache folder consists of them
    inside = isinstance(named, str) and Path(os.path.abspath(folder / named)).is_relative_to(here)
    if not inside or not named.endswith((".safetensors", ".safetensors.index.json")):
        raise WorkloadError(
            f"{NAMED} {named!r} in {folder / 'config.json'} is not a file of safetensors in this folder; name one"
        )
    return str(named)


def stale_in(folder: Path) -> set[Path]:
    """Return the leftover files of an earlier save in `folder`: an index beside a whole file, and its shards."""
    if file_of(folder) != SINGLE or not (folder / INDEX).exists():
        return set()
    with contextlib.suppress(WorkloadError):  # whatever it contains
        return {folder / INDEX, *(folder / name for name in shards_of(folder / INDEX) if name != SINGLE)}
    return {folder / INDEX}


def shards_of(index: Path) -> list[str]:
    """Return the names of the files in an index. Raises WorkloadError if it is none."""
    try:
        return sorted(set(map(str, json.loads(index.read_text())["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{index} is not an index of weights ({type(error).__name__}: {error})") from None


def has_weights(folder: str) -> bool:
    """Return whether `folder` holds a checkpoint that `weight_files.Weights` reads.

    Raises WorkloadError if there is only a pickled one.
    """
    if file_of(Path(folder)) is not None or (Path(folder) / METADATA).exists():
        return True
    if pickled := next((name for name in PICKLED if (Path(folder) / name).exists()), None):
        raise WorkloadError(
            f"{folder} has its weights in {pickled}, and nothing is unpickled here; "
            "convert the checkpoint to safetensors"
        )
    return False


def check_none_unread(folder: str) -> None:
    """Raise WorkloadError if `folder` holds weights under names that are not read, or that transformers prefers.

    A model would otherwise begin with other weights than intended.
    """
    check_no_adapter(folder)
    names = sorted(path.name for path in Path(folder).glob("*") if path.is_file())
    first = next(filter(DISTRIBUTED.fullmatch, names), None)
    if first is None and not has_weights(folder):
        first = next(filter(UNREAD.fullmatch, names), None)
    if first is not None:
        raise WorkloadError(
            f"{folder} has weights in {first}, which is not read here; load the folder with transformers and save it "
            f"with save_pretrained, which writes {SINGLE}, or remove the file to start from random weights"
        )


def check_of_class(folder: str) -> None:
    """Raise WorkloadError if an unchanged transformers class cannot read the weights in `folder`."""
    if has_weights(folder) and file_of(Path(folder)) is None:
        raise WorkloadError(
            f"{folder} has weights of torch.distributed.checkpoint, and its class runs as a class of transformers; "
            "convert them to safetensors"
        )


def weights_of_model(model: str) -> str | None:
    """Return the folder with the weights of the model `hf:<folder>`; None for a preset, and for a configuration
    without weights.

    Raises WorkloadError as `has_weights` does.
    """
    if not model.startswith(FOLDER):
        return None
    folder = str(root(model.removeprefix(FOLDER)))
    return folder if has_weights(folder) else None

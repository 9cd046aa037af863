"""The export of an own model: its weights under its own names, and the code that they belong to. If transformers has
the class too, the export uses its names, and includes what makes its inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import code_of
from orchestrator.data.config import DataSpec
from orchestrator.data.samples.own_samples import open_samples
from workloads.adapters.adapter import merged_reader
from workloads.own.declared import OF_BUFFERS
from workloads.own.model import NETWORK, OwnModel, OwnWorkload
from workloads.own.object_reference import code_hash, is_built_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from orchestrator.data.store.tokens import Tokens

WEIGHTS = "model.safetensors"
ABOUT = "own.json"


def write_own(
    data: DataSpec,
    seed: int,
    own_code: Mapping[str, str],
    tokens: Tokens,
    workload: OwnWorkload,
    read: Callable[[str], Tensor],
    folder: str,
) -> float | None:
    """Write model.safetensors and own.json, which has the class, its options and a hash of its code; an adapter is
    merged.

    For a class that transformers has, tensors have its names, and config.json is included. Samples add what makes
    them, as far as they provide it.

    Returns the largest difference to the outputs of transformers; None without such a class. Raises RuntimeError if
    it is too large.
    """
    from safetensors.torch import save_file

    plain = replace(workload, adapter=None).shapes
    whole = merged_reader(workload.adapter, workload.shapes, read) if workload.adapter else read
    tensors = {name.removeprefix(NETWORK): whole(name).contiguous() for name in plain}
    config: OwnModel = workload.config
    if callable(to_hf := getattr(config.bare, "to_hf", None)):
        about_it, tensors = to_hf(tensors)
        (Path(folder) / "config.json").write_text(json.dumps(about_it, indent=2) + "\n")
    save_file(tensors, str(Path(folder) / WEIGHTS), {"format": "pt"})
    about = {"model": config.reference, "options": json.loads(config.options), "code": code_of(own_code)}
    about["vocabulary_size"] = config.vocab_size
    (Path(folder) / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    if data.samples is not None:
        open_samples(data.samples, seed).export(tokens.folder.uri, folder)
    return _difference(folder)


def _difference(folder: str) -> float | None:
    """Return the largest difference of the outputs in `folder` to those of transformers; None for a class without a
    comparison.

    Raises RuntimeError if it is too large.
    """
    from workloads.hf.check.compare import TOLERANCE, load

    model = load_own(folder)
    if not callable(difference_to := getattr(model, "difference_to", None)):
        return None
    found = float(difference_to(load(folder)))
    if not found <= TOLERANCE:
        raise RuntimeError(f"the exported model's outputs differ by {found:.2e}; nothing was published")
    return found


def load_own(folder: str | Path) -> nn.Module:
    """Return the exported model in a local folder, ready to use. Raises InputError if its code has changed."""
    from safetensors.torch import load_file

    place = Path(folder) / ABOUT
    if not place.is_file():
        raise InputError("holds no export of an own model", str(folder), "give the folder of one")
    about: dict[str, Any] = json.loads(place.read_text())
    if not is_built_in(about["model"]) and code_hash(about["model"]) != about["code"][about["model"]]:
        raise InputError(
            f"the code of {about['model']} is not that of these weights", str(folder), "put it back"
        )
    options: dict[str, Any] = about["options"]
    # the run began from that folder; the model is in this one now
    if "folder" in options and is_built_in(about["model"]):
        options = {**options, "folder": str(folder)}
    config = OwnModel(about["model"], json.dumps(options), about["vocabulary_size"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(OF_BUFFERS)
        model = config.make()
    tensors = load_file(Path(folder) / WEIGHTS)
    if callable(from_hf := getattr(model, "from_hf", None)):
        tensors = from_hf(tensors)
    model.load_state_dict(tensors, strict=False)
    return model.eval()

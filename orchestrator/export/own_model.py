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
from orchestrator.resolve.resolved_job import wrong_input
from workloads.adapters.adapter import merged_reader
from workloads.errors import WorkloadError
from workloads.own.declared import OF_BUFFERS
from workloads.own.model import NETWORK, OwnModel, OwnWorkload
from workloads.own.object_reference import check_outside, code_hash, is_built_in, is_object_reference

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
    form: str = "safetensors",
) -> float | None:
    """Write model.safetensors and own.json, which has the class, its options and a hash of its code; an adapter is
    merged.

    With the form hf the model's code travels too, see `own_for_transformers`. For a class that transformers has,
    tensors have its names, and config.json is included. Samples add what makes them, as far as they provide it.

    Returns the largest difference to the outputs of transformers; None without such a class. Raises RuntimeError if
    it is too large.
    """
    from safetensors.torch import save_file

    plain = replace(workload, adapter=None).shapes
    read_merged = merged_reader(workload.adapter, workload.shapes, read) if workload.adapter else read
    tensors = {name.removeprefix(NETWORK): read_merged(name).contiguous() for name in plain}
    config: OwnModel = workload.config
    to_hf = getattr(config.bare, "to_hf", None)
    if callable(to_hf):
        about_it, tensors = to_hf(tensors)
        (Path(folder) / "config.json").write_text(json.dumps(about_it, indent=2) + "\n")
    leaves = form == "hf" and to_hf is None
    if leaves:
        tensors = {f"{NETWORK}{name}": tensor for name, tensor in {**tensors, **_fixed(config)}.items()}
    save_file(tensors, str(Path(folder) / WEIGHTS), {"format": "pt"})
    about = {"model": config.reference, "options": json.loads(config.options), "code": code_of(own_code)}
    about["vocabulary_size"] = config.vocab_size
    (Path(folder) / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    if data.samples is not None:
        open_samples(data.samples, seed).export(tokens.folder.uri, folder)
    if leaves:
        return _leave(data, seed, tokens=tokens, workload=workload, read=read, folder=folder)
    return _difference(folder)


def _leave(
    data: DataSpec,
    seed: int,
    tokens: Tokens,
    workload: OwnWorkload,
    read: Callable[[str], Tensor],
    folder: str,
) -> float:
    """Write the code and the tokenizer, and return the largest difference of outputs in another process.

    Raises InputError if the code cannot travel, RuntimeError if it differs there.
    """
    from orchestrator.export.own_for_transformers import check_folder, write_code, write_own_tokenizer

    write_own_tokenizer(data, tokens, workload, folder)
    with wrong_input("checkpoint.export"):
        flat = write_code(workload.config, tokens.manifest.roles, Path(folder))
    return check_folder(
        data, seed, tokens=tokens, workload=workload, read=read, folder=folder, needs=flat.needs
    )


def _fixed(config: OwnModel) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(OF_BUFFERS)
        model = config.make()
    kept = model.state_dict().keys()
    return {name: buffer.contiguous() for name, buffer in model.named_buffers() if name not in kept}


def _difference(folder: str) -> float | None:
    """Return the largest difference of the outputs in `folder` to those of transformers; None for a class without a
    comparison.

    Raises RuntimeError if it is too large.
    """
    from workloads.hf.check.compare import TOLERANCE, load

    model = load_own(folder)
    if not callable(difference_to := getattr(model, "difference_to", None)):
        return None
    result = float(difference_to(load(folder)))
    if not result <= TOLERANCE:
        raise RuntimeError(f"the exported model's outputs differ by {result:.2e}; nothing was published")
    return result


def about_own(folder: str | Path) -> dict[str, Any] | None:
    """Return what own.json says of the model in a local folder; None without the file. Nothing is imported.

    Raises InputError if the file is damaged, or if the model's code is not here, has changed, or is in the folder.
    """
    path = Path(folder) / ABOUT
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(path.read_text())
        model, code = about["model"], about["code"]
        if not (is_object_reference(model) and isinstance(about["options"], dict) and isinstance(code, dict)):
            raise ValueError("it names no model")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot be read ({error})", str(path), "export the commit again") from None
    with wrong_input(str(folder)):
        check_outside(model, folder)
        # Code of this project changes with its version, and is no part of a run.
        if not is_built_in(model) and code_hash(model) != code.get(model):
            raise WorkloadError(f"the code of {model} is not that of these weights; put it back")
    return about


def load_own(folder: str | Path) -> nn.Module:
    """Return the exported model in a local folder, ready to use. Raises InputError, also for code that has changed or
    that is in the folder itself.
    """
    from safetensors.torch import load_file

    about = about_own(folder)
    if about is None:
        raise InputError("holds no export of an own model", str(folder), "give the folder of one")
    options: dict[str, Any] = about["options"]
    # the run began from that folder; the model is in this one now
    if "folder" in options and is_built_in(about["model"]):
        options = {**options, "folder": str(folder)}
    config = OwnModel(about["model"], json.dumps(options), about["vocabulary_size"])
    with torch.random.fork_rng(devices=[]), wrong_input(str(folder)):
        torch.manual_seed(OF_BUFFERS)
        model = config.make()
    tensors = {
        name.removeprefix(NETWORK): tensor for name, tensor in load_file(Path(folder) / WEIGHTS).items()
    }
    if callable(from_hf := getattr(model, "from_hf", None)):
        tensors = from_hf(tensors)
    model.load_state_dict(tensors, strict=False)
    return model.eval()

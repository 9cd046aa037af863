"""Read transformers folders of image models: configuration and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workloads.errors import WorkloadError

CONFIG = "config.json"


def options_of(folder: str, kind: str) -> dict[str, Any]:
    """Return the configuration of a model of that model_type. Raises ValueError if the folder holds none."""
    path = Path(folder) / CONFIG
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give the folder of a model") from None
    if document.get("model_type") != kind:
        raise ValueError(f"{path} is of model_type {document.get('model_type')}, but this model is {kind}")
    return document


def load_weights(model: nn.Module, folder: str) -> None:
    """Load a folder's weights into the model through its `from_hf`. Does nothing for a model on the meta device.

    Raises ValueError if tensors are missing or have other shapes.
    """
    if next(model.parameters()).is_meta:
        return
    from workloads.hf.files.weight_files import Weights

    try:
        stored = Weights(folder)
        tensors = {name: stored.read(name) for name in stored.names}
    except WorkloadError as error:
        raise ValueError(str(error)) from None
    state: dict[str, torch.Tensor] = model.from_hf(tensors)  # type: ignore[operator]
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit: {' '.join(str(error).split())[:150]}") from None

"""Load the weights of a folder into an own model: an export of it, or a transformers folder of the same class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.hf.files.weight_files import Weights
from workloads.model.stored import Misfit, refuse_misfits, refuse_strange
from workloads.own.declared import is_of_hf
from workloads.own.model import NETWORK, OwnModel

FREE = frozenset(
    {"architectures", "bos_token_id", "pad_token_id", "logit_scale_init_value", "mask_ratio", "norm_pix_loss"}
    | {"projection_dim"}  # tensors use it, but a configuration may lack it
)
"""Fields of a configuration that may differ between runs with the same weights."""


class FolderWeights:
    """The weights in a local folder, see `workloads.model.stored.StoredWeights`. All are read together.

    Raises WorkloadError if they do not have the model's shapes, or if the folder's configuration computes something
    else.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, config: OwnModel, folder: str, shapes: Mapping[str, torch.Size]) -> None:
        stored = Weights(folder)
        tensors: Mapping[str, Tensor] = {name: stored.read(name) for name in stored.names}
        if is_of_hf(config.bare):
            _check_config(config.bare, folder)
            tensors = config.bare.from_hf(tensors)  # type: ignore[operator]
        else:  # an export with its code also has the buffers that no checkpoint has
            kept = config.bare.state_dict().keys()
            fixed = {name for name, _ in config.bare.named_buffers() if name not in kept}
            plain = {name.removeprefix(NETWORK): tensor for name, tensor in tensors.items()}
            tensors = {name: tensor for name, tensor in plain.items() if name not in fixed}
        self._tensors = {f"{NETWORK}{name}": tensor for name, tensor in tensors.items()}
        hint = "give the model of the folder"
        stored_shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        problems = [
            Misfit(name, shape, stored_shapes.get(name))
            for name, shape in shapes.items()
            if stored_shapes.get(name) != shape
        ]
        refuse_misfits(problems, folder, hint)
        refuse_strange([name for name in self._tensors if name not in shapes], folder, hint)

    def find(self, name: str) -> Tensor | None:
        """See `StoredWeights`."""
        return self._tensors.get(name)


def _check_config(bare: nn.Module, folder: str) -> None:
    """Raise WorkloadError if the folder's configuration computes something else. Missing fields have transformers'
    defaults.
    """
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # each transformers configuration fails in its own way
        reason = " ".join(str(error).split())[:150]
        raise WorkloadError(f"{folder} has no configuration of transformers ({reason})") from None
    ours, _ = bare.to_hf(bare.state_dict())  # type: ignore[operator]
    for name, mine, other in _unlike(ours, theirs):
        raise WorkloadError(f"{folder} has {name} {other!r}, and workload.changes {mine!r}; give the same")


def _unlike(ours: Mapping[str, Any], theirs: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return the fields that both configurations have with different values."""
    differences: list[tuple[str, Any, Any]] = []
    both = ours.keys() & (theirs.keys() if isinstance(theirs, dict) else set()) - FREE
    for name in sorted(both, key=lambda name: (name != "model_type", name)):
        mine, other = ours[name], theirs[name]
        if isinstance(mine, Mapping):
            differences += _unlike(mine, other, f"{prefix}{name}.")
        elif mine != other:
            differences.append((f"{prefix}{name}", mine, other))
    return differences

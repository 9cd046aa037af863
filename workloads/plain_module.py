"""Derive a workload's tensors, parameter depths and initial values from a module itself.

Used for transformers classes and own models. The project's transformers derive them from their configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from workloads.adapters.adapter import Adapter
    from workloads.workload import Workload


def shapes_of(workload: Workload) -> Mapping[str, torch.Size]:
    """See Workload.shapes. A shared tensor has the name under which it comes first."""
    with torch.device("meta"):
        model = workload.build()
    kept = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.shape for name, tensor in named if name in kept}


def depths_of(workload: Workload) -> Mapping[str, int]:
    """Return Workload.depth of every tensor, by the order of the layers in `blocks`.

    Parameters before the first layer count as embeddings, parameters after it outside of all layers as the head.
    """
    with torch.device("meta"):
        model = workload.build()
    blocks = workload.blocks(model)
    number = {id(p): i for i, block in enumerate(blocks) for p in block.parameters()}
    depths = {}
    past_first = False
    for name, parameter in model.named_parameters():
        past_first = past_first or id(parameter) in number
        layer = number.get(id(parameter), len(blocks) if past_first else -1)
        depths[name] = len(blocks) - layer
    return dict.fromkeys(workload.shapes, 0) | depths


def embeddings_of(workload: Workload) -> frozenset[str]:
    """Return Workload.embeddings."""
    with torch.device("meta"):
        model = workload.build()
    return embeddings_in(model, workload.blocks(model))


def embeddings_in(model: nn.Module, blocks: Sequence[nn.Module]) -> frozenset[str]:
    """Return the parameters of all `nn.Embedding`, and those before the first layer of `blocks`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = {id(parameter) for block in blocks for parameter in block.parameters()}
    names = set()
    is_before = bool(layers)
    for name, parameter in model.named_parameters():
        is_before = is_before and id(parameter) not in layers
        if is_before or id(parameter) in tables:
            names.add(name)
    return frozenset(names)


def initial_of(
    workload: Workload,
    adapter: Adapter | None,
    own_tensor: Callable[[str, int], Tensor],
    name: str,
    seed: int,
) -> Tensor:
    """See Workload.initial. `own_tensor(name, seed)` returns a tensor of the module itself; the adapter makes
    those that it adds.

    Raises WorkloadError if the model has no such tensor.
    """
    if name not in workload.shapes:
        raise WorkloadError(
            f"{workload.name} has no tensor {name!r}; its names are those of named_parameters()"
        )
    if adapter and adapter.adds(name):
        return adapter.initial(name, workload.shapes[name], seed, partial(workload.initial, seed=seed))
    return own_tensor(name, seed)

"""A workload's model with given weights, to evaluate or to generate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workloads.model.fake_quantise import quantise_for_inference
from workloads.model.scheme import Scheme
from workloads.workload import Workload


def with_weights(
    workload: Workload,
    read: Callable[[str], Tensor],
    device: torch.device | None = None,
    scheme: Scheme | None = None,
) -> nn.Module:
    """Return the workload's model in evaluation mode, with the weights that `read(name)` returns. On CPU by default.

    With a `scheme` its linear layers are fake-quantised.
    """
    with torch.device("meta"):
        model = workload.build()
    model.to_empty(device=device or torch.device("cpu")).eval()
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            if name in workload.shapes:
                tensor.copy_(read(name))
    if scheme is not None:
        quantise_for_inference(model, workload.blocks(model), scheme)
    return model

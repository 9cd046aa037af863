"""Bottleneck adapters (Houlsby et al., 2019, section 2.1): two small layers behind each sub-layer of a layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.transformer import Layer


class Bottleneck(nn.Module):
    """x + up(gelu(down(x))), of a sub-layer's output before it is added to the residual."""

    def __init__(self, size: int, narrow: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, narrow)
        self.up = nn.Linear(narrow, size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] to the same."""
        return x + self.up(F.gelu(self.down(x)))


def add_bottlenecks(model: nn.Module, hidden: int, narrow: int) -> None:
    """Give each layer of a model two: behind its attention and behind its feed-forward."""
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.attention_adapter = Bottleneck(hidden, narrow)
            layer.feedforward_adapter = Bottleneck(hidden, narrow)

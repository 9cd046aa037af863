"""The position-wise feed-forward network, plain or gated."""

from __future__ import annotations

from torch import Tensor, nn

from workloads.model.config import TransformerConfig
from workloads.model.layers import activation, joined


class FeedForward(nn.Module):
    """down(act(up(x))), or down(joined(gate(x), up(x))) when gated, see `layers.joined`."""

    def __init__(self, config: TransformerConfig, intermediate: int = 0) -> None:
        super().__init__()
        size, bias = intermediate or config.intermediate, config.feedforward_bias
        self.gate = nn.Linear(config.hidden, size, bias=bias) if config.gated else None
        self.up = nn.Linear(config.hidden, size, bias=bias)
        self.down = nn.Linear(size, config.hidden, bias=bias)
        self.activation, self.joined = activation(config.activation), joined(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [.., hidden] to [.., hidden]."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.joined(self.gate(hidden), self.up(hidden)))

"""Prefixes of keys and values in every layer (Li and Liang, 2021, without reparametrisation), which is P-tuning v2 (Liu
et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.attention import Attention
from workloads.model.config import TransformerConfig
from workloads.model.transformer import Transformer


class Prefix(nn.Module):
    """Learned keys and values, each [kv_heads * head_dim, count], which every token attends to; column i is that of
    position i, before the tokens, which begin at position `count`."""

    def __init__(self, width: int, head_dim: int, count: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(width, count))
        self.value = nn.Parameter(torch.empty(width, count))
        self.head_dim = head_dim

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, L, D] of tokens, with those of the prefix before them."""
        return self._before(self.key, key), self._before(self.value, value)

    def _before(self, learned: Tensor, of_tokens: Tensor) -> Tensor:
        # As many heads as a tensor-parallel rank has.
        heads = learned.unflatten(0, (-1, self.head_dim)).transpose(1, 2).to(of_tokens.dtype)
        return torch.cat((heads.expand(len(of_tokens), -1, -1, -1), of_tokens), dim=2)


def add_prefixes(model: nn.Module, config: TransformerConfig, count: int) -> None:
    """Give each attention of a model a prefix. Raises WorkloadError if the model can have none."""
    for reason, wrong in (
        ("it has two stacks", config.architecture == "encoder-decoder" or bool(config.generator)),
        ("its layers share weights", config.shared_layers),
        ("its attention is latent", config.latent is not None),
        ("its attention has a window", bool(config.window)),
        ("its positions are not absolute", config.positions not in ("learned", "rotary")),
        ("its scores depend on distances", config.biased_by_distance or bool(config.disentangled)),
        ("it has block positions", config.block_positions),
    ):
        if wrong:
            raise WorkloadError(f"this model can have no prefix: {reason}; use lora")
    assert isinstance(model, Transformer)
    model.prefix_length = count
    for module in model.modules():
        if isinstance(module, Attention):
            width = config.kv_heads * config.head_dim
            module.prefix = Prefix(width, config.head_dim, count)

"""What a generating model keeps of the tokens that it has read: the keys and values of every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workloads.model.config import TransformerConfig
from workloads.model.sparse import near


@dataclass
class LayerCache:
    """Of one layer: keys and values [B, kv_heads, slots, D], slot i for position i, None before the first token; and
    those of the memory, for cross-attention."""

    keys: Tensor | None = None
    values: Tensor | None = None
    memory: tuple[Tensor, Tensor] | None = None


@dataclass
class Cache:
    """The keys and values of a batch of rows with at most `slots` tokens each.

    Rows need not be of one length: a row's token is kept at its own position, and what padding has left there is
    hidden until a later token replaces it.
    """

    slots: int
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """Where the tokens of this forward pass stand: int64 [B, L]."""
    length: int = 0
    """One more than the last position so far."""
    layers: dict[tuple[int, str], LayerCache] = field(default_factory=dict)

    def advance(self, positions: Tensor) -> None:
        """Begin a forward pass over tokens at these positions, int64 [B, L]."""
        self.positions, self.length = positions, max(self.length, int(positions.max()) + 1)

    def add(self, layer: LayerCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values [B, kv_heads, L, D] of this pass; returns all that there are, by position."""
        if layer.keys is None or layer.values is None:
            layer.keys, layer.values = (
                x.new_zeros(*x.shape[:2], self.slots, x.shape[3]) for x in (key, value)
            )
        places = self.positions[:, None, :, None]
        layer.keys.scatter_(2, places.expand_as(key), key)
        layer.values.scatter_(2, places.expand_as(value), value)
        return layer.keys[:, :, : self.length], layer.values[:, :, : self.length]

    def visible(self, config: TransformerConfig, windowed: bool = True) -> Tensor:
        """Which positions the tokens of this pass attend to, in layers with the window or without: bool [B, 1, L,
        length]."""
        query = self.positions[:, :, None]
        key = torch.arange(self.length, device=query.device)
        seen = key <= query
        if windowed and config.window:
            seen = seen & near(config, query, key, self.length)
        return seen.unsqueeze(1)

"""The key-value cache of a generating model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workloads.model.config import TransformerConfig
from workloads.model.sparse import near


@dataclass
class LayerCache:
    """The cache of one layer: keys and values [B, kv_heads, slots, D].

    Slot i holds position i. Both are None before the first token. Cross-attention also caches the keys and values of
    the encoder's output.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    memory: tuple[Tensor, Tensor] | None = None


@dataclass
class Cache:
    """The keys and values of a batch, for at most `slots` tokens in each row.

    Rows may differ in length: a token is stored at its own position. Entries that padding has written stay hidden until
    a later token overwrites them.
    """

    slots: int
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """The positions of the tokens in this forward pass, int64 [B, L]."""
    length: int = 0
    """The largest position so far, plus one."""
    layers: dict[tuple[int, str], LayerCache] = field(default_factory=dict)

    def advance(self, positions: Tensor) -> None:
        """Begin a forward pass over tokens at `positions`, int64 [B, L]."""
        self.positions, self.length = positions, max(self.length, int(positions.max()) + 1)

    def select(self, rows: Tensor) -> None:
        """Keep the rows at the indices `rows`, int64 [new B], in this order; a row may be taken several times."""
        for layer in self.layers.values():
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if layer.memory is not None:
                layer.memory = (layer.memory[0][rows], layer.memory[1][rows])

    def add(self, layer: LayerCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, kv_heads, L, D] of this pass, and return all that are stored,
        ordered by position.

        Args:
            layer: the layer's part of the cache.
            key: [B, kv_heads, L, D].
            value: [B, kv_heads, L, D of the values].

        Returns:
            [B, kv_heads, length, D] each. Slots that no token of a row has written yet are zeros, which `visible`
            hides.
        """
        if layer.keys is None or layer.values is None:
            layer.keys, layer.values = (
                x.new_zeros(*x.shape[:2], self.slots, x.shape[3]) for x in (key, value)
            )
        indices = self.positions[:, None, :, None]
        # Rows are at different positions, so a slice would not do: slot = position, per row.
        layer.keys.scatter_(2, indices.expand_as(key), key)
        layer.values.scatter_(2, indices.expand_as(value), value)
        return layer.keys[:, :, : self.length], layer.values[:, :, : self.length]

    def visible(self, config: TransformerConfig, windowed: bool = True) -> Tensor:
        """Return which positions the tokens of this pass attend to, bool [B, 1, L, length], in layers with or without
        the window.

        Args:
            config: the model.
            windowed: whether the layers have the window.
        """
        query = self.positions[:, :, None]
        key = torch.arange(self.length, device=query.device)
        visible = key <= query
        if windowed and config.window:
            visible = visible & near(config, query, key, self.length)
        return visible.unsqueeze(1)

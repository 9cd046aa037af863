"""Dropout in an unchanged Hugging Face class, by our counter-based generator in place of torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.model.dropout import drop, keyed


class CountedDropout(nn.Dropout):
    """Replaces a dropout module: drops features of hidden states [B, L, features] as `workloads.model.dropout` does.

    p is 0, because classes pass it to attention kernels, which would draw random numbers themselves. `rows` int64 [B]
    are the keys of the micro-batch. They stay until the next one, so that a recomputed layer drops the same features.
    """

    def __init__(self, rate: float, site: int) -> None:
        super().__init__(0.0)
        self.rate = rate
        self.site = site
        self.rows: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x` has any shape; shapes other than [B, L, features] are returned unchanged."""
        if not self.training or self.rows is None or x.dim() != 3 or len(x) != len(self.rows):
            return x
        keys = keyed(self.rows.unsqueeze(1), torch.arange(x.shape[1], device=x.device))
        return drop(x, self.rate, keys, self.site)


def counted(network: nn.Module, rate: float) -> list[CountedDropout]:
    """Replace all dropout modules of a network. Return the new ones, numbered in order."""
    replaced: list[CountedDropout] = []
    for parent in list(network.modules()):
        for leaf, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                replaced.append(CountedDropout(rate, len(replaced)))
                setattr(parent, leaf, replaced[-1])
    return replaced

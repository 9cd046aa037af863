"""Dropout of a class of transformers, from our generator in place of torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.model.dropout import drop, keyed


class CountedDropout(nn.Dropout):
    """In place of a dropout module: drops hidden states [B, L, features] as `workloads.model.dropout` does.

    p is 0, since classes hand it on to kernels of attention, which would draw. `rows` int64 [B] are the keys of the
    micro-batch; they stay until the next one, so that a layer that is recomputed draws the same.
    """

    def __init__(self, rate: float, site: int) -> None:
        super().__init__(0.0)
        self.rate, self.site = rate, site
        self.rows: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape; what is not [B, L, features] is left as it is."""
        if not self.training or self.rows is None or x.dim() != 3 or len(x) != len(self.rows):
            return x
        keys = keyed(self.rows.unsqueeze(1), torch.arange(x.shape[1], device=x.device))
        return drop(x, self.rate, keys, self.site)


def counted(network: nn.Module, rate: float) -> list[CountedDropout]:
    """Put such modules in place of torch's, each with a number of its own."""
    found: list[CountedDropout] = []
    for parent in list(network.modules()):
        for leaf, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                found.append(CountedDropout(rate, len(found)))
                setattr(parent, leaf, found[-1])
    return found

"""Disentangled attention: content attends to distances, and distances to content (He et al. 2021, DeBERTa, equation 4;
DeBERTa V2 release for the buckets and the projections that are shared with content)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workloads.model.config import TransformerConfig
from workloads.model.layers import norm


class Between(NamedTuple):
    """What layers need to know of distances: their vectors [2 * buckets, hidden], and for a query and a key which of
    them is theirs, int64 [1 or B, L, L]; and whether they are of two segments, bool [B, L, L], None where there are
    none (XLNet)."""

    vectors: Tensor
    numbers: Tensor
    other: Tensor | None = None


class Distances(nn.Module):
    """A vector for each bucket of distances, and the norm of all."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.buckets, self.farthest = config.disentangled, config.relative_distance
        self.weight = nn.Parameter(torch.empty(2 * self.buckets, config.hidden))
        self.norm = norm(config)

    def forward(self, positions: Tensor) -> Between:
        """Of tokens that stand at `positions` int64 [1 or B, L]."""
        apart = positions[:, :, None] - positions[:, None, :]
        numbers = bucket(apart, self.buckets, self.farthest) + self.buckets
        return Between(self.norm(self.weight), numbers.clamp(0, 2 * self.buckets - 1))


def bucket(distance: Tensor, buckets: int, farthest: int) -> Tensor:
    """Bucket of query position minus key position, int64: exact up to half of the buckets, then logarithmic up to that
    farthest distance."""
    exact = buckets // 2
    away = distance.abs()
    share = torch.log(away.clamp(min=exact) / exact) / torch.log(torch.tensor((farthest - 1) / exact))
    far = torch.ceil(share * (exact - 1)).long() + exact
    return torch.where(away <= exact, distance, far * distance.sign())


def scores(query: Tensor, key: Tensor, of_queries: Tensor, of_keys: Tensor, numbers: Tensor) -> Tensor:
    """q kr + k qr of every query and key, [B, heads, L, L]: queries and keys are [B, heads, L, D], those of distances
    [1, heads, 2 * buckets, D], and numbers as in `Between`."""
    numbers = numbers.unsqueeze(1).expand(*query.shape[:2], -1, -1)
    to_distance = (query @ of_keys.transpose(-2, -1)).gather(-1, numbers)
    from_distance = (key @ of_queries.transpose(-2, -1)).gather(-1, numbers.transpose(-2, -1))
    return to_distance + from_distance.transpose(-2, -1)

"""Disentangled attention: content attends to distances, and distances to content.

He et al. 2021, DeBERTa, equation 4. Buckets, and projections shared with content, follow the DeBERTa V2 release.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workloads.model.config import TransformerConfig
from workloads.model.layers import norm


class Between(NamedTuple):
    """The distances between queries and keys, as layers need them.

    The first field holds the vectors of all distances, [2 * buckets, hidden]; the second the index of the vector of
    each query and key, int64 [1 or B, L, L]; the third whether the two are in different segments, bool [B, L, L], None
    without segments (XLNet).
    """

    vectors: Tensor
    numbers: Tensor
    other: Tensor | None = None


class Distances(nn.Module):
    """The vectors of all distance buckets, and the norm that is applied to them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.buckets, self.farthest = config.disentangled, config.relative_distance
        self.weight = nn.Parameter(torch.empty(2 * self.buckets, config.hidden))
        self.norm = norm(config)

    def forward(self, positions: Tensor) -> Between:
        """Return the distances between tokens at `positions` int64 [1 or B, L]."""
        apart = positions[:, :, None] - positions[:, None, :]
        # Shifted to 0 .. 2 x buckets - 1, since negative distances come first in the table.
        numbers = bucket(apart, self.buckets, self.farthest) + self.buckets
        return Between(self.norm(self.weight), numbers.clamp(0, 2 * self.buckets - 1))


def bucket(distance: Tensor, buckets: int, farthest: int) -> Tensor:
    """Return the bucket of query position minus key position, int64.

    Buckets are exact up to half of `buckets`, then logarithmic up to the distance `farthest`.

    Args:
        distance: int64, of any shape.
        buckets: number of buckets on each side.
        farthest: distance of the last bucket.
    """
    exact = buckets // 2
    away = distance.abs()
    # Clamped: `where` discards the share of near distances, but log 0 = -inf has no meaning as an integer.
    share = torch.log(away.clamp(min=exact) / exact) / torch.log(torch.tensor((farthest - 1) / exact))
    far = torch.ceil(share * (exact - 1)).long() + exact
    return torch.where(away <= exact, distance, far * distance.sign())


def scores(query: Tensor, key: Tensor, of_queries: Tensor, of_keys: Tensor, numbers: Tensor) -> Tensor:
    """Return q kr + k qr of every query and key, [B, heads, L, L].

    query and key are [B, heads, L, D]; of_queries and of_keys, the projected distances, [1, heads, 2 * buckets, D];
    numbers as in `Between`.

    Args:
        query: [B, heads, L, D].
        key: [B, heads, L, D].
        of_queries: vectors of distances through the query projection, [1, heads, 2 x buckets, D].
        of_keys: vectors of distances through the key projection, [1, heads, 2 x buckets, D].
        numbers: as in `Between`, [1 or B, L, L].
    """
    # expand allocates nothing: `gather` reads the same [L, L] numbers for every head.
    numbers = numbers.unsqueeze(1).expand(*query.shape[:2], -1, -1)
    # Scores of all distances, [B, heads, L, 2 * buckets], of which each pair takes that of its own distance. The second
    # product is indexed [key, query], so its result is transposed.
    to_distance = (query @ of_keys.transpose(-2, -1)).gather(-1, numbers)
    from_distance = (key @ of_queries.transpose(-2, -1)).gather(-1, numbers.transpose(-2, -1))
    return to_distance + from_distance.transpose(-2, -1)

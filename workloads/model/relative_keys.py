"""Relative attention scores: a query's products with a key's distance and segment.

Dai et al. 2019, Transformer-XL, section 3.3; Yang et al. 2019, XLNet, section 2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.model.config import TransformerConfig
from workloads.model.disentangled import Between
from workloads.model.positions import sinusoids


class RelativeKeys(nn.Module):
    """The learned vectors of XLNet's relative scores: query biases for content, distance and segment, each [heads * D],
    and the segment keys, same and other, [heads * D, 2].

    A tensor-parallel rank has those of its own heads.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.heads * config.head_dim
        self.head_dim = config.head_dim
        self.content = nn.Parameter(torch.empty(width))
        self.distance = nn.Parameter(torch.empty(width))
        self.segment = nn.Parameter(torch.empty(width))
        self.segments = nn.Parameter(torch.empty(width, 2))

    def forward(self, query: Tensor, keys: Tensor, between: Between) -> tuple[Tensor, Tensor]:
        """Return the content queries, and the part of the scores that does not depend on content, [B, heads, L, L].

        query is [B, heads, L, D]; keys [1, heads, 2 L - 1, D] are those of the distances in `between`.

        Args:
            query: [B, heads, L, D].
            keys: of the distances 1 - L .. L - 1, [1, heads, 2 L - 1, D].
            between: the distance and the segments of each pair.
        """
        numbers = between.numbers.unsqueeze(1).expand(*query.shape[:2], -1, -1)
        # Scores of all 2 L - 1 distances, of which each pair takes that of its own. This replaces the relative shift of
        # Transformer-XL, and also works for permuted positions.
        scores = ((query + self._heads(self.distance)) @ keys.transpose(-2, -1)).gather(-1, numbers)
        if between.other is not None:
            of_segments = self.segments.view(-1, self.head_dim, 2).to(query.dtype)
            same, other = ((query + self._heads(self.segment)) @ of_segments).unsqueeze(-2).unbind(-1)
            scores = scores + torch.where(between.other.unsqueeze(1), other, same)
        return query + self._heads(self.content), scores

    def _heads(self, bias: Tensor) -> Tensor:
        return bias.view(-1, 1, self.head_dim)


def distances(positions: Tensor, length: int, size: int, types: Tensor | None) -> Between:
    """Return the vectors of all distances between `length` tokens at `positions` int64 [1 or B, L], fp32 [2 L - 1,
    size].

    Positions are from 0 to L - 1. Token `types` [B, L] tell segments apart.

    Args:
        positions: int64 [1 or B, L].
        length: L.
        size: of a vector.
        types: int64 [B, L]; None without segments.
    """
    vectors = sinusoids(torch.arange(1 - length, length, device=positions.device), size)
    apart = positions[:, :, None] - positions[:, None, :] + length - 1
    return Between(vectors, apart, None if types is None else types[:, :, None] != types[:, None, :])

"""Map token vectors to the first hidden states."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from workloads.model.config import TransformerConfig
from workloads.model.dropout import drop
from workloads.model.layers import embedding, norm
from workloads.model.positions import sinusoids


class Embeddings(nn.Module):
    """Adds position, token type and task type embeddings to token vectors [B, L, embedding_size], then applies norm and
    dropout.

    Some models first multiply the token vectors by the root of their size (Vaswani et al. 2017, section 3.4).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size, learned = config.embedding_size, config.positions == "learned"
        self.offset, self.dropout = config.position_offset, config.dropout
        self.scale = sqrt(size) if config.scaled_embedding else 1.0
        self.sinusoidal = config.positions == "sinusoidal"
        count = config.max_positions + config.position_offset
        self.positions = embedding(count, size) if learned else None
        self.blocks = embedding(count, size) if config.block_positions else None
        self.token_types = embedding(config.token_types, size) if config.token_types else None
        self.task_types = embedding(config.task_types, size) if config.task_types else None
        # Replaces the embeddings of tokens at query positions (XLNet).
        self.query = nn.Parameter(torch.empty(size)) if config.positions == "relative_keys" else None
        self.norm = norm(config, size) if config.embedding_norm else None

    def forward(
        self,
        vectors: Tensor,
        positions: Tensor,
        token_types: Tensor | None,
        keys: Tensor | None,
        task_types: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Return the first hidden states, [B, L, embedding_size].

        Args:
            vectors: token vectors, [B, L, embedding_size].
            positions: int64 [1 or B, L], or [B, 2, L] with block positions (GLM, section 2.1).
            token_types: int64 [B, L]; None for type 0.
            keys: dropout keys, as in `Context`.
            task_types: int64 [B, L]; None for task 0.
            queries: bool [B, L], True at the positions of the query stream; None without.
        """
        if self.query is not None and queries is not None:
            vectors = torch.where(queries.unsqueeze(-1), self.query.to(vectors.dtype), vectors)
        vectors = vectors if self.scale == 1.0 else vectors * self.scale
        if self.blocks is not None:
            # A batch without block positions is one whole block: its second coordinate is zero.
            second = positions[:, 1] if positions.dim() == 3 else torch.zeros_like(positions)
            positions = positions[:, 0] if positions.dim() == 3 else positions
            vectors = vectors + self.blocks(second + self.offset)
        if self.positions is not None:
            vectors = vectors + self.positions(positions + self.offset)
        if self.sinusoidal:
            vectors = vectors + sinusoids(positions, vectors.shape[-1]).to(vectors.dtype)
        none = torch.zeros_like(vectors[..., 0], dtype=torch.long)
        if self.token_types is not None:
            vectors = vectors + self.token_types(none if token_types is None else token_types)
        if self.task_types is not None:
            vectors = vectors + self.task_types(none if task_types is None else task_types)
        return drop(vectors if self.norm is None else self.norm(vectors), self.dropout, keys, 0)


def batch_positions(config: TransformerConfig, batch: dict[str, Tensor]) -> Tensor:
    """Return the batch's positions, or 0, 1, 2, ... as [1, L]. Counted positions skip padding and are [B, L].

    Args:
        config: the model.
        batch: has `tokens` [B, L].
    """
    if "positions" in batch:
        return batch["positions"]
    tokens = batch["tokens"]
    if config.counted_positions:
        real = tokens != config.position_offset - 1
        # Padding gets -1, which the offset turns into the padding's row of the table.
        return real.cumsum(-1) * real - 1
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)

"""Vectors of texts: several texts in a row, each computed alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.model.dropout import KEYS, keyed
from workloads.workload import Batch

TEXT: tuple[str, ...] = ("tokens", "token_types", "padding")
"""The entries of a batch along its rows."""


class TextPooling(nn.Module):
    """Computes each text of a row alone, and joins their vectors. Has no parameters."""

    def __init__(self, parts: int, pooling: str) -> None:
        super().__init__()
        self.parts, self.pooling = parts, pooling

    def apart(self, batch: Batch) -> Batch:
        """Return the batch with a row for each text: [B, parts x L] becomes [B x parts, L]."""
        rows: Batch = {
            name: batch[name].reshape(-1, batch[name].shape[1] // self.parts)
            for name in TEXT
            if name in batch
        }
        if KEYS in batch:
            numbers = torch.arange(self.parts, device=batch[KEYS].device)
            rows[KEYS] = keyed(batch[KEYS].unsqueeze(1), numbers).flatten()
        return rows

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """Map hidden [B x parts, L, hidden] and padding bool [B x parts, L] to vectors fp32 [B, parts x hidden].

        Args:
            hidden: [B x parts, L, hidden].
            padding: bool [B x parts, L].
        """
        hidden = hidden.float()
        if self.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            real = padding.unsqueeze(-1)
            vectors = (hidden * real).sum(1) / real.sum(1).clamp(min=1)
        return vectors.view(-1, self.parts * vectors.shape[-1])

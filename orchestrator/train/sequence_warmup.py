"""Shorter sequences at the beginning of training: every sample is cut into several rows, and none is left out.

Li et al., 2022, "The stability-efficiency dilemma", shorten samples by dropping their ends. Here a step keeps its
tokens, labels and positions in the order of samples, and only attention is limited to a row. So the receipt, the token
counts and the state of a resumed run do not change.
"""

from __future__ import annotations

import torch

from workloads.model.dropout import KEYS, PLACES
from workloads.workload import Batch

PER_ROW = (KEYS,)
"""Entries of a batch without a length dimension. Every other entry has the length in all dimensions but the first."""


def shortened(batch: Batch, length: int) -> Batch:
    """Return the batch with its rows [B, L] cut into rows [B x L / length, length], in order.

    Positions begin at 0 in every row. A document that began in an earlier row continues from there.

    Args:
        batch: [B, L] with its other entries.
        length: of the rows; L is a multiple of it.
    """
    rows, sample_length = batch["tokens"].shape
    parts = sample_length // length
    if parts == 1:
        return batch
    result = {name: _cut(name, entry, parts, length) for name, entry in batch.items()}
    if "positions" in batch:
        # A document from an earlier row counts from the row's beginning, j; one that begins in this row at s has j - s
        # already.
        result["positions"] = torch.minimum(result["positions"], torch.arange(length))
    if KEYS in batch:  # the place in the whole sample, so that no two of its tokens share their dropout
        result[PLACES] = torch.arange(sample_length).view(parts, length).repeat(rows, 1)
    return result


def _cut(name: str, entry: torch.Tensor, parts: int, length: int) -> torch.Tensor:
    """Return one entry of the batch with its rows cut into `parts` rows."""
    if name in PER_ROW:
        return entry.repeat_interleave(parts, 0)
    if entry.dim() == 2:
        return entry.reshape(-1, length)
    # A mask [B, L, L]: keep the blocks on its diagonal, because a row attends only to itself.
    blocks = entry.view(-1, parts, length, parts, length).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 1).reshape(-1, length, length)

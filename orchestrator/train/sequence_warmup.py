"""Shorter sequences at the beginning of training: every sample is cut into several rows, of which none is left out.

The paper (Li et al., 2022, "The stability-efficiency dilemma") shortens samples by leaving their ends out. Here a step
has the tokens, the labels and the positions in the order of samples that it would have without: only what a token may
attend to is less. So the receipt, the counts of tokens and what a resumed run goes on with do not change.
"""

from __future__ import annotations

import torch

from workloads.model.dropout import KEYS, PLACES
from workloads.workload import Batch

PER_ROW = (KEYS,)
"""Entries of a batch that have no length; the others have it in every dimension but the first."""


def shortened(batch: Batch, length: int) -> Batch:
    """The batch with its rows [B, L] cut into rows [B x L / length, length], in order.

    Positions begin at 0 in every row; a document that began in an earlier row goes on from there.
    """
    rows, whole = batch["tokens"].shape
    parts = whole // length
    if parts == 1:
        return batch
    found = {name: _cut(name, entry, parts, length) for name, entry in batch.items()}
    if "positions" in batch:
        found["positions"] = torch.minimum(found["positions"], torch.arange(length))
    if KEYS in batch:  # so that no two tokens of a sample share their dropout
        found[PLACES] = torch.arange(whole).view(parts, length).repeat(rows, 1)
    return found


def _cut(name: str, entry: torch.Tensor, parts: int, length: int) -> torch.Tensor:
    if name in PER_ROW:
        return entry.repeat_interleave(parts, 0)
    if entry.dim() == 2:
        return entry.reshape(-1, length)
    blocks = entry.view(-1, parts, length, parts, length).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 1).reshape(-1, length, length)

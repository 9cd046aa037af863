"""The micro-batches of a held-out set, equally many on every rank.

A rank without a sample left computes a micro-batch without labels, because the collectives of its peers need it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orchestrator.data.samples.held_out_set import HeldOut
from orchestrator.data.samples.own_samples import OwnHeldOut
from workloads.model.masks import DECODER_REAL, REAL
from workloads.model.transformer import IGNORED
from workloads.own.rows import COUNTED
from workloads.workload import Batch

ROUTED = ((REAL, "tokens", "padding"), (DECODER_REAL, "decoder_tokens", "decoder_padding"))
"""Names of a batch's entries: the mask of routed tokens, the tokens, and the mask of padding."""
LABELS = ("labels", "sequence_labels")
"""Names of a batch's entries with labels."""


def micro_batch(
    held_out: HeldOut | OwnHeldOut, part: int, *, samples: int, size: int, is_routed: bool
) -> Batch:
    """Return a micro-batch of a held-out set. Rows beyond the last sample repeat sample 0, without labels.

    Args:
        held_out: the set.
        part: the number of the micro-batch.
        samples: how many samples of the set are evaluated.
        size: rows of a micro-batch.
        is_routed: whether the model has routers, which count the tokens of real rows alone.
    """
    numbers = torch.arange(part * size, (part + 1) * size)
    is_sample = numbers < samples
    batch = held_out.batch(numbers.where(is_sample, 0).tolist())
    if bool(is_sample.all()):
        return batch
    for name in () if COUNTED in batch else LABELS:
        if name in batch:
            none = math.nan if batch[name].is_floating_point() else IGNORED
            batch[name] = batch[name].masked_fill(_wide(~is_sample, batch[name]), none)
    for name in ("compared", COUNTED):
        if name in batch:
            batch[name] = batch[name] & is_sample
    # Nor are these rows routed, since routers count their tokens.
    for name, read, padding in ROUTED if is_routed else ():
        if read in batch:
            real = batch.get(padding, torch.ones_like(batch[read], dtype=torch.bool))
            batch[name] = real & _wide(is_sample, real)
    return batch


def _wide(rows: Tensor, like: Tensor) -> Tensor:
    """Return bool [B] as [B, 1, ..], to broadcast over `like`."""
    return rows.view(-1, *[1] * (like.dim() - 1))

"""Rows without labels, which add nothing to a loss.

The collectives of a step need equally many micro-batches of every rank. A rank without a sample left computes one
without labels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workloads.model.masks import DECODER_REAL, REAL
from workloads.own.rows import COUNTED
from workloads.workload import IGNORED, Batch

ROUTED = ((REAL, "tokens", "padding"), (DECODER_REAL, "decoder_tokens", "decoder_padding"))
"""Names of a batch's entries: the mask of routed tokens, the tokens, and the mask of padding."""
LABELS = ("labels", "sequence_labels")
"""Names of a batch's entries with labels."""


def labelled(batch: Batch, is_sample: Tensor, is_routed: bool) -> Batch:
    """Return a micro-batch in which only some rows have labels, so that the others add nothing to any sum.

    Args:
        batch: the micro-batch.
        is_sample: which rows keep their labels, bool [B].
        is_routed: whether the model has routers, which count the tokens of those rows alone.
    """
    batch = dict(batch)
    for name in () if COUNTED in batch else LABELS:
        if name in batch:
            # Regression has labels in floating point, whose losses leave out NaN.
            no_label = math.nan if batch[name].is_floating_point() else IGNORED
            batch[name] = batch[name].masked_fill(_broadcastable(~is_sample, batch[name]), no_label)
    for name in ("compared", COUNTED):
        if name in batch:
            batch[name] = batch[name] & is_sample
    # Nor are these rows routed, since routers count their tokens.
    for name, tokens_name, padding in ROUTED if is_routed else ():
        if tokens_name in batch:
            is_token = batch.get(padding, torch.ones_like(batch[tokens_name], dtype=torch.bool))
            batch[name] = is_token & _broadcastable(is_sample, is_token)
    return batch


def filled_up(batches: list[Batch], count: int, size: int) -> list[Batch]:
    """Return `count` micro-batches of `size` samples: the given ones, then the last one again without labels.

    The model has no routers, which would count its tokens.

    Args:
        batches: the micro-batches with samples.
        count: that every rank computes in the step.
        size: samples of a micro-batch.
    """
    if len(batches) == count:
        return batches
    no_samples = torch.zeros(size, dtype=torch.bool)
    return batches + [labelled(batches[-1], no_samples, is_routed=False)] * (count - len(batches))


def _broadcastable(rows: Tensor, like: Tensor) -> Tensor:
    """Return bool [B] as [B, 1, ..], to broadcast over `like`."""
    return rows.view(-1, *[1] * (like.dim() - 1))

"""Which rows of a batch are samples: the last batch of an evaluation is padded with others."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.workload import COUNTED, IGNORED, Batch

LABELS = "labels"


def sample_rows(batch: Batch) -> Tensor:
    """Return which rows are samples, bool [B]. Padding rows have nothing to predict."""
    if COUNTED in batch:
        return batch[COUNTED]
    labels = batch.get(LABELS, batch.get("sequence_labels"))
    if labels is None:
        first = next(iter(batch.values()))
        return torch.ones(len(first), dtype=torch.bool, device=first.device)
    none = labels.isnan() if labels.is_floating_point() else labels == IGNORED
    return ~none.flatten(1).all(1) if labels.dim() > 1 else ~none

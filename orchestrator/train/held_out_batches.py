"""The micro-batches of a held-out set, equally many on every rank.

A rank without a sample left computes a micro-batch without labels, because the collectives of its peers need it.
"""

from __future__ import annotations

import torch

from orchestrator.data.samples.held_out_set import HeldOut
from orchestrator.data.samples.own_samples import OwnHeldOut
from orchestrator.train.unlabelled import labelled
from workloads.workload import Batch


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
    return batch if bool(is_sample.all()) else labelled(batch, is_sample, is_routed)

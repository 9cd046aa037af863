"""The largest logits of a vocabulary that may be cut over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.parallel.collectives import gathered
from orchestrator.parallel.mesh import ProcessGroup
from workloads.objectives.distillation import WHOLE, Shards, Top, log_sum, top_of


def top_over_ranks(logits: Tensor, k: int, temperature: float, shards: Shards, tp: ProcessGroup) -> Top:
    """Return the k largest logits of each row, in order, on all ranks of the group.

    Each rank sends its own k largest, never its part of the vocabulary.

    Args:
        logits: this rank's logits [n, V of this rank].
        k: number of logits to return per token.
        temperature: the temperature T that divides the logits before the log-sum.
        shards: how the vocabulary is cut.
        tp: the group over which it is cut.
    """
    if shards is WHOLE:
        return top_of(logits, k, temperature)
    logits = logits.float()
    # Parts may differ by one token. Equal shapes are gathered: what a rank lacks is -inf.
    own_count = min(k, logits.shape[-1])
    values, tokens = logits.topk(own_count)
    values = torch.nn.functional.pad(values, (0, k - own_count), value=-torch.inf)
    tokens = torch.nn.functional.pad(tokens + shards.start, (0, k - own_count))
    # [n, k x tp]: the k largest of the vocabulary are among the k largest of each part.
    all_values = gathered(values, 1, tp)
    top_values, indices = all_values.topk(k)
    log_sums = log_sum(logits / temperature, shards)
    return Top(gathered(tokens, 1, tp).gather(1, indices).int(), top_values, log_sums)

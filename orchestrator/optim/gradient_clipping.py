"""Gradient clipping: the global norm of the gradients, and the factor that scales them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from orchestrator.parallel.parameter_shard import ParameterShard


def squared_norm(shards: Iterable[ParameterShard]) -> Tensor:
    """Return this rank's part of the squared global norm of the gradients, an fp64 scalar.

    The norm is sqrt of the sum over ranks. Each element is counted on one rank only (`ParameterShard.counted`).
    """
    counted = [s.parameter.grad for s in shards if s.counted and s.parameter.grad is not None]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    # Each tensor's norm by one fused kernel in its own dtype; only the sum over tensors needs fp64.
    return torch.stack(torch._foreach_norm(counted)).double().square().sum()


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that scales gradients of the global `norm` to at most `max_norm`; 1 if `max_norm` is None.

    Like `torch.nn.utils.clip_grad_norm_`, it adds 1e-6 to the norm.

    Args:
        norm: global norm of the gradients.
        max_norm: the largest norm that is left alone.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))

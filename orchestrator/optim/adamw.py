"""AdamW (Loshchilov and Hutter, 2019): torch's fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestrator.optim.groups import groups_of_shards

if TYPE_CHECKING:
    from orchestrator.optim.build import OptimizerContext


def build(context: OptimizerContext) -> torch.optim.Optimizer:
    """See `orchestrator.optim.build`."""
    spec = context.spec
    groups = groups_of_shards(spec, context.shards, context.rate)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)

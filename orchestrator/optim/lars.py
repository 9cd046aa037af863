"""LARS (You et al., 2017): momentum on gradients, scaled to a share of the norm of each matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestrator.optim.groups import groups_of_each_shard

if TYPE_CHECKING:
    from orchestrator.optim.build import OptimizerContext


def build(context: OptimizerContext) -> torch.optim.Optimizer:
    """See `orchestrator.optim.build`."""
    return Lars(context)


class Lars(torch.optim.Optimizer):
    """You et al., 2017, algorithm 1: momentum on gradients scaled to a share of each matrix's norm."""

    step_count_on_host = True
    """`step` reads the step count as a Python number. On a GPU tensor this would be a synchronisation."""

    TRUST = 0.001
    """The trust coefficient, eta in the paper."""

    def __init__(self, context: OptimizerContext) -> None:
        spec = context.spec
        groups = groups_of_each_shard(spec, context.shards, context.rate)
        super().__init__(groups, {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps})
        self._norms = context.norms
        self._shards = context.shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients."""
        weights = [group["params"][0] for group in self.param_groups]
        gradients = [p.grad for p in weights]
        norms_by_shard = zip(self._norms(weights), self._norms(gradients), self._shards, strict=True)
        for group, p, (weight_norm, gradient_norm, shard) in zip(
            self.param_groups, weights, norms_by_shard, strict=True
        ):
            state = self.state[p]
            decay = group["weight_decay"]
            state.setdefault("momentum", torch.zeros_like(p))
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            # The decay is part of the change and so scaled by the same local rate (algorithm 1), unlike AdamW's.
            update = p.grad + decay * p
            if shard.matrix:
                # A matrix w with gradient g: the rate is lr * eta * |w| / (|g| + decay * |w| + eps), with norms of full
                # tensors.
                local_rate = self.TRUST * weight_norm / (gradient_norm + decay * weight_norm + group["eps"])
                ratio = torch.where((weight_norm > 0) & (gradient_norm > 0), local_rate, 1.0)
                shard.multiply(update, ratio * group["lr"])
            else:
                update.mul_(group["lr"])
            # The learning rate is inside of the momentum, as in the paper: a change of the rate then acts on new
            # gradients only.
            momentum = state["momentum"].mul_(group["betas"][0])
            p.sub_(momentum.add_(update))

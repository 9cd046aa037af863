"""LAMB (You et al., 2020): Adam's update, scaled to the norm of each matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestrator.optim.groups import groups_of_each_shard

if TYPE_CHECKING:
    from orchestrator.optim.build import OptimizerContext


def build(context: OptimizerContext) -> torch.optim.Optimizer:
    """See `orchestrator.optim.build`."""
    return Lamb(context)


class Lamb(torch.optim.Optimizer):
    """You et al., 2020, algorithm 2: Adam's update, scaled to the norm of each matrix; no scale for vectors."""

    step_count_on_host = True
    """`step` reads the step count as a Python number. On a GPU tensor this would be a synchronisation."""

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
        # All updates before any norm: the norms need one all-reduce for all tensors instead of one for each.
        updates = [self._update(group) for group in self.param_groups]
        # A matrix w with Adam's update u: w -= lr * |w| / |u| * u. The norms are of full tensors, so they are summed
        # over the ranks that hold shards. The update u includes the decay.
        norms_by_shard = zip(self._norms(weights), self._norms(updates), self._shards, strict=True)
        for group, p, update, (weight_norm, update_norm, shard) in zip(
            self.param_groups, weights, updates, norms_by_shard, strict=True
        ):
            if shard.matrix:
                # A tensor that starts at zero would stay there with a ratio of 0; a zero update would divide by zero.
                ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
                shard.multiply(update, ratio * group["lr"])
            else:
                update.mul_(group["lr"])
            p.sub_(update)

    def _update(self, group: dict[str, Any]) -> Tensor:
        p, (beta1, beta2) = group["params"][0], group["betas"]
        state = self.state[p]
        state.setdefault("exp_avg", torch.zeros_like(p))
        state.setdefault("exp_avg_sq", torch.zeros_like(p))
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        # The bias correction needs the count of this parameter's own updates, since thawed parameters begin later.
        steps = float(state["step"])
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        mean.lerp_(p.grad, 1 - beta1)
        square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        return (mean / (1 - beta1**steps)).div_(root).add_(p, alpha=group["weight_decay"])

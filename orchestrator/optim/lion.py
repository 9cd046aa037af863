"""Lion (Chen et al., 2023): the sign of an interpolated momentum."""

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
    return Lion(groups, {"lr": spec.lr, "betas": spec.betas})


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2: the sign of an interpolated momentum."""

    step_count_on_host = True
    """`step` reads the step count as a Python number. On a GPU tensor this would be a synchronisation."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                average = state["exp_avg"]
                # The update looks nearer at this gradient (beta1) than the stored average does (beta2), and is made
                # before the average takes the gradient.
                update = torch.lerp(p.grad, average, beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)

"""Muon for the matrices of the layers, AdamW for the rest.

Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks": momentum (Nesterov's), whose matrix is
made orthogonal by five Newton-Schulz iterations. The update has the size of Adam's (Liu et al., 2025, "Muon is Scalable
for LLM Training", equation 4), so that learning rate and decay serve both parts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import groups_of_shards
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.parameter_shard import ParameterShard

if TYPE_CHECKING:
    from orchestrator.optim.build import OptimizerContext

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of the quintic polynomial whose iteration brings every singular value near one."""
ITERATIONS = 5
MIN_NORM = 1e-7
RMS = 0.2
"""The root mean square of an update's elements, which is about that of AdamW's updates."""


def build(context: OptimizerContext) -> torch.optim.Optimizer:
    """Return Muon for the shards of the matrices in `context.full`, AdamW for the others. See
    `orchestrator.optim.build`.
    """
    assert context.full is not None
    full = context.full
    groups: list[dict[str, Any]] = []
    for is_matrix in (True, False):
        shards = [shard for shard in context.shards if (shard.name in full.names) == is_matrix]
        groups += [
            {**group, "muon": is_matrix} for group in groups_of_shards(context.spec, shards, context.rate)
        ]
    # Its `step` is collective: ranks without a matrix must still take part in every reduce and broadcast of `full`.
    if not groups:  # a rank without a shard still helps to gather the other ranks' matrices
        groups = [{"params": [], "lr": 0.0, "lr_scale": 1.0, "weight_decay": 0.0, "muon": True}]
    return Muon(groups, context.spec, full, context.matmul_dtype)


class Muon(torch.optim.Optimizer):
    """Groups with `muon` hold the matrices of `full`; AdamW updates the other groups.

    `dtype` is the type of the Newton-Schulz iterations.
    """

    def __init__(
        self, groups: list[dict[str, Any]], spec: OptimizerSpec, full: FullMatrices, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, {"lr": spec.lr})
        self._momentum = spec.momentum
        self._full = full
        self._dtype = dtype
        adamw_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw = (
            torch.optim.AdamW(adamw_groups, betas=spec.betas, eps=spec.eps, fused=True)
            if adamw_groups
            else None
        )
        if self._adamw is not None:
            self._adamw.state = self.state  # both share one state per parameter, each with its own slots

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients. All ranks call it together."""
        if self._adamw is not None:
            self._adamw.step()
        group_of = {p: group for group in self.param_groups if group["muon"] for p in group["params"]}
        for shard, update in self._full.changed(self._direction, self._orthogonal):
            p = shard.parameter
            group, (rows, columns) = group_of[p], shard.cut.shape[-2:]
            # Decoupled decay before the update, as in AdamW, so that decay means the same for both parts.
            p.mul_(1 - group["lr"] * group["weight_decay"])
            # An orthogonal matrix [rows, columns] has elements of root mean square 1 / sqrt(max(rows, columns)), so
            # this factor makes it RMS.
            p.add_(update, alpha=-group["lr"] * RMS * math.sqrt(max(rows, columns)))

    def _direction(self, shard: ParameterShard) -> Tensor:
        """Update the momentum, and return the gradient with Nesterov momentum."""
        p = shard.parameter
        assert p.grad is not None
        state = self.state[p]
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
        # An average and not a sum, so that gradient and momentum have one scale in the mixture below. The scale of the
        # result does not matter, since the update is made orthogonal.
        momentum.lerp_(p.grad, 1 - self._momentum)
        return p.grad.lerp(momentum, self._momentum)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        return orthogonal(matrix, self._dtype)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return approximately U V^T of the singular value decomposition U S V^T of each matrix [.., rows, columns], fp32.

    The singular values of the result are between about 0.7 and 1.2.

    Args:
        matrix: fp32 [.., rows, columns].
        dtype: of the iterations' products.
    """
    a, b, c = COEFFICIENTS
    # bf16 suffices: the iteration corrects errors of earlier ones, and the result need only be near orthogonal (Jordan
    # et al., 2024).
    x = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    # Dividing by the Frobenius norm brings all singular values to at most 1, from where the iteration converges. The
    # gram matrix of a wide matrix is the smaller one, so tall matrices are transposed.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        # a x + b (x x^T) x + c (x x^T)^2 x: each singular value s becomes a s + b s^3 + c s^5, and the singular
        # vectors stay.
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrix.dtype)

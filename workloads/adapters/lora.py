"""Low-rank adapters: the learned change of a linear layer is a product of two narrow matrices.

LoRA (Hu et al., 2021, section 4.1), rank-stabilised LoRA (Kalajdzievski, 2023, theorem 3.2) and DoRA (Liu et al., 2024,
equation 5).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.adapters.nf4 import QuantisedWeight
from workloads.model.moe import Experts

EXPERTS_A, EXPERTS_B = "_lora_a", "_lora_b"
"""Suffixes of the names of a low-rank pair next to a stacked weight of experts."""


class Factor(nn.Module):
    """One of the two low-rank factors: a linear map [out, in] without a bias."""

    def __init__(self, out: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, size))
        self.product: Callable[..., Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
        return self.product(x, self.weight)


class Magnitude(nn.Module):
    """DoRA's learned norm of each row of the weight."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out))

    def forward(self, norms: Tensor) -> Tensor:
        """Return the factor of each row, [out], for the norms [out] of the rows."""
        return self.weight / norms


class LoraLinear(nn.Module):
    """Computes W x + scale * B A x + b for a linear layer whose W and b keep their names.

    With a magnitude m (DoRA), the rows of W + scale * B A are rescaled to the norms m. Under tensor parallelism, a rank
    has a shard of W, and of either A or B. If W is sharded over its inputs, `gather` sums the products over all ranks,
    and `total` the squares of their parts of each row. Both are identities here.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float, magnitude: bool) -> None:
        super().__init__()
        self.weight: Tensor | QuantisedWeight = layer.weight
        self.bias = layer.bias
        self.lora_a = Factor(rank, layer.in_features)
        self.lora_b = Factor(layer.out_features, rank)
        self.magnitude = Magnitude(layer.out_features) if magnitude else None
        self.scale = scale
        self.product: Callable[..., Tensor] = F.linear
        self.gather: Callable[[Tensor], Tensor] = _same
        self.total: Callable[[Tensor], Tensor] = _same

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
        # Two narrow products, in -> rank -> out: B A itself would be as large as W.
        y = self.product(x, self.weight) + self.lora_b(self.lora_a(x)) * self.scale
        if self.magnitude is not None:
            # m / |row of W + scale * B A|, so each row has the norm m.
            # Before the sum over ranks and before the bias: the factor belongs to rows of the weight, which are the
            # same on all ranks.
            y = y * self.magnitude(self._norms()).to(y.dtype)
        y = self.gather(y)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Return the norms of the rows of W + scale * B A, without a gradient (DoRA, section 4.3)."""
        # In fp32: the norm of a row sums thousands of squares, and its error would rescale the whole output.
        with torch.autocast(self.lora_a.weight.device.type, enabled=False):
            kept = self.weight
            weight = kept.values(torch.float32) if isinstance(kept, QuantisedWeight) else kept
            moved = direction(weight, self.lora_a.weight, self.lora_b.weight, self.scale)
            return self.total(moved.square().sum(1)).sqrt()


def add_to_experts(experts: Experts, name: str, rank: int, scale: float) -> None:
    """Add a low-rank pair for each expert to the stacked weight `name` [experts, out, in].

    The pair is `<name>_lora_a` [experts, rank, in] and `<name>_lora_b` [experts, out, rank].
    """
    count, out, size = getattr(experts, name).shape
    experts.lora_scale = scale
    experts.register_parameter(f"{name}{EXPERTS_A}", nn.Parameter(torch.empty(count, rank, size)))
    experts.register_parameter(f"{name}{EXPERTS_B}", nn.Parameter(torch.empty(count, out, rank)))


def direction(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A, for each expert of a stack."""
    return (
        torch.add(weight, b @ a, alpha=scale) if weight.dim() == 3 else torch.addmm(weight, b, a, alpha=scale)
    )


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    """Return the weight [out, in] of a plain linear layer with the same output as the adapted one."""
    moved = direction(weight, a, b, scale)
    return moved if magnitude is None else moved * (magnitude / moved.norm(dim=1)).unsqueeze(1)


def _same(x: Tensor) -> Tensor:
    return x

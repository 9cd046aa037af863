"""Linear maps whose products are in 8 bits, float8 e4m3 (Micikevicius et al., 2022, "FP8 Formats for Deep Learning").

The product forward and the gradient of the input have 8 bits. The gradient of the weight, a sum over all tokens, is in
the compute dtype: torchao calls this recipe `rowwise_with_gw_hp`. Each row of a factor has a scale of its own, which is
a power of two: so a number is rounded by itself, whatever else is in its row, unless it is 2^-14 of the largest or
less. A part of a row on one rank is rounded as it is in the whole row on another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
MULTIPLE = 16
"""Of which inputs and outputs of a product in 8 bits have to be a multiple (cuBLAS, CUTLASS)."""
EXPONENT = 0x7F800000
"""The bits of a float32 that are its exponent; alone they are the power of two below it."""
LEAST = 2.0**-100
"""What counts as the largest number of a row of zeros."""


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, size] in 8 bits, and by what each is to be multiplied to have them back, fp32 [n, 1]. A row with what is
    not finite has nothing else."""
    largest = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST)
    scale = ((LARGEST / largest).view(torch.int32) & EXPONENT).view(torch.float32)
    return (rows * scale.to(rows.dtype)).to(DTYPE), scale.reciprocal()


def product(x: Tensor, weight: Tensor, exact: bool = False) -> Tensor:
    """x [n, in] times a weight [out, in], both in the compute dtype, in 8 bits: [n, out]. `exact` sums in fp32 where
    tensor cores would be faster with less."""
    (rows, of_rows), (columns, of_columns) = quantise(x), quantise(weight)
    by_row, fast = ScalingType.RowWise, not exact
    return F.scaled_mm(
        rows, columns.t(), of_rows, by_row, of_columns.t(), by_row, output_dtype=x.dtype, use_fast_accum=fast
    )


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """[.., in] in the compute dtype to [.., out]; the weight [out, in] may be in another."""
    return product(x.flatten(0, -2), weight.to(x.dtype)).view(*x.shape[:-1], len(weight))


def backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `forward`'s x [.., in] by that of its outcome [.., out]."""
    rows = gradient.flatten(0, -2).contiguous()
    found = product(rows, weight.to(gradient.dtype).t().contiguous(), exact=True)
    return found.view(*gradient.shape[:-1], weight.shape[1])


def fits(weight: Tensor) -> bool:
    """Whether a weight [out, in] has sizes for products in 8 bits."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, in 8 bits within autocast."""
    dtype = torch.get_autocast_dtype(x.device.type)
    y: Tensor = _Linear.apply(x.to(dtype), weight)
    return y if bias is None else y + bias.to(dtype)


class Float8Linear(nn.Linear):
    """A linear layer whose products are in 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] to [.., out]."""
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_x = backward(gradient, weight)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
        return of_x, of_weight

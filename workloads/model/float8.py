"""Linear layers with 8-bit products, float8 e4m3 (Micikevicius et al., 2022, "FP8 Formats for Deep Learning").

The forward product and the gradient of the input use 8 bits. The gradient of the weight, a sum over all tokens, uses
the compute dtype; torchao calls this recipe `rowwise_with_gw_hp`. Each row of a factor has its own scale, a power of
two. The rounding of an element therefore does not depend on the other elements of the row, unless it is at most 2^-14
of the largest. A rank that holds a part of a row rounds it as a rank that holds the whole row.
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
"""In 8 bits, input and output sizes must be multiples of this (cuBLAS, CUTLASS)."""
EXPONENT = 0x7F800000
"""The exponent bits of a float32. Keeping only these bits rounds down to a power of two."""
LEAST = 2.0**-100
"""Replaces the largest absolute value of a row of zeros, to avoid a division by zero."""


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [n, size] to 8 bits, and return them with the factors that restore them, fp32 [n, 1].

    A row with a non-finite element becomes entirely non-finite.
    """
    largest = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST)
    # Rounded down to a power of two: the row fits the range of float8, and scaling itself rounds nothing.
    scale = ((LARGEST / largest).view(torch.int32) & EXPONENT).view(torch.float32)
    return (rows * scale.to(rows.dtype)).to(DTYPE), scale.reciprocal()


def product(x: Tensor, weight: Tensor, exact: bool = False) -> Tensor:
    """Return x [n, in] times weight [out, in]^T in 8 bits, [n, out]. Both are in the compute dtype.

    With `exact`, tensor cores accumulate in fp32 instead of with fewer bits, which is slower.

    Args:
        x: [n, in].
        weight: [out, in], of the same dtype.
        exact: whether to accumulate in fp32.
    """
    # Both are scaled along the summed dimension `in`, so that the scales are constant within each dot product and
    # factor out of it.
    (rows, of_rows), (columns, of_columns) = quantise(x), quantise(weight)
    by_row, fast = ScalingType.RowWise, not exact
    return F.scaled_mm(
        rows,
        columns.t(),
        scale_a=of_rows,
        scale_recipe_a=by_row,
        scale_b=of_columns.t(),
        scale_recipe_b=by_row,
        output_dtype=x.dtype,
        use_fast_accum=fast,
    )


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of `x` and `weight`^T in 8 bits, [.., out].

    Args:
        x: [.., in], in the compute dtype.
        weight: [out, in]; it may have another dtype.
    """
    return product(x.flatten(0, -2), weight.to(x.dtype)).view(*x.shape[:-1], len(weight))


def backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `forward`'s x, [.., in].

    Args:
        gradient: of the output, [.., out].
        weight: [out, in].
    """
    rows = gradient.flatten(0, -2).contiguous()
    # The weight is quantised again by columns, since this product sums over `out`. Gradients need the exact sum:
    # errors of fast accumulation add up over layers.
    gradient_rows = product(rows, weight.to(gradient.dtype).t().contiguous(), exact=True)
    return gradient_rows.view(*gradient.shape[:-1], weight.shape[1])


def fits(weight: Tensor) -> bool:
    """Return whether the sizes of a weight [out, in] support 8-bit products."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `torch.nn.functional.linear`, with 8-bit products within autocast.

    Args:
        x: [.., in].
        weight: [out, in].
        bias: [out], or None.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    y: Tensor = _Linear.apply(x.to(dtype), weight)
    return y if bias is None else y + bias.to(dtype)


class Float8Linear(nn.Linear):
    """A linear layer with 8-bit products."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
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
            # Not in 8 bits: the sum runs over all tokens, whose sizes differ by orders of magnitude, and small ones
            # would be lost.
            of_weight = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
        return of_x, of_weight

"""Frozen weights in 4 bits: NF4 (Dettmers et al., 2023, "QLoRA", section 3), by bitsandbytes.

A block is 64 elements of a row, with its largest absolute value in fp32 as scale: 4.5 bits per weight. The scales are
not quantised again (double quantisation), because its constants depend on the whole tensor, and a rank may have only a
part.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.stored import Part, StoredTensor, whole

BLOCK = 64
"""The number of elements that share a scale."""
AT_ONCE = 2**18
"""The approximate number of elements that are quantised at a time. On a CPU bitsandbytes needs a hundred bytes for
each.
"""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 [out, in / 2], and the scales, fp32 [out, in / 64], of a weight [out, in]."""
    rows, columns = weight.shape
    codes, scales = _operators().quantize_4bit(weight.float().contiguous(), BLOCK, "nf4", torch.uint8)
    return codes.view(rows, columns // 2), scales.view(rows, columns // BLOCK)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] from the codes and scales of `quantise`."""
    shape = (len(codes), 2 * codes.shape[1])
    weight: Tensor = _operators().dequantize_4bit(
        codes.view(-1, 1), scales.flatten(), BLOCK, "nf4", shape=shape, dtype=dtype
    )
    return weight


def rounded(weight: Tensor) -> Tensor:
    """Round a weight [out, in] to its 4-bit values, fp32. Rounding is idempotent."""
    return dequantise(*quantise(weight), torch.float32)


@dataclass(frozen=True)
class RoundedTensor:
    """A stored weight [out, in], rounded to 4 bits. Any part equals the same part of the whole rounded weight."""

    plain: StoredTensor

    @property
    def shape(self) -> torch.Size:
        """See `StoredTensor`."""
        return self.plain.shape

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        rows, columns = part or whole(self.shape)
        blocks = blocks_with(columns)
        values = rounded(self.plain[(rows, blocks)])
        return values[:, columns.start - blocks.start : columns.stop - blocks.start]


def blocks_with(columns: slice) -> slice:
    """Extend a range of columns to whole blocks."""
    return slice(columns.start // BLOCK * BLOCK, -(-columns.stop // BLOCK) * BLOCK)


class QuantisedWeight(nn.Module):
    """A part of a weight in 4 bits: `rows` rows and some columns, stored with the whole blocks around these columns."""

    codes: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: slice) -> None:
        super().__init__()
        blocks = blocks_with(columns)
        width = blocks.stop - blocks.start
        self._inner = slice(columns.start - blocks.start, columns.stop - blocks.start)
        self.register_buffer("codes", torch.empty(rows, width // 2, dtype=torch.uint8), persistent=False)
        self.register_buffer("scales", torch.empty(rows, width // BLOCK), persistent=False)

    def fill(self, stored: StoredTensor, rows: slice, columns: slice) -> None:
        """Quantise a part of a stored weight, a few rows at a time to save memory."""
        plain = stored.plain if isinstance(stored, RoundedTensor) else stored
        blocks = blocks_with(columns)
        step = max(1, AT_ONCE // (blocks.stop - blocks.start))
        for at in range(rows.start, rows.stop, step):
            stop = min(at + step, rows.stop)
            codes, scales = quantise(plain[(slice(at, stop), blocks)])
            self.codes[at - rows.start : stop - rows.start].copy_(codes)
            self.scales[at - rows.start : stop - rows.start].copy_(scales)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [rows, columns]."""
        return dequantise(self.codes, self.scales, dtype)[:, self._inner]


class QuantisedLinear(nn.Module):
    """A linear layer with its weight in 4 bits."""

    def __init__(self, weight: QuantisedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
        y = product(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def product(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Map [.., in] to [.., out]. The backward pass keeps only the 4-bit weight."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    output: Tensor = _Product.apply(x, weight)
    return output


class _Product(torch.autograd.Function):
    """A product with a weight that is dequantised in the forward pass, and again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantisedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.values(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.values(gradient.dtype), None


def _operators() -> Any:
    """Return the operators of bitsandbytes."""
    silence()
    import bitsandbytes  # noqa: F401

    return torch.ops.bitsandbytes


def silence() -> None:
    """Silence the import of bitsandbytes, which prints notes about features that this program does not use. peft
    imports it too.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

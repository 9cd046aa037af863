"""AdamW with moments in 8 bits (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization").

A moment is stored as codes of 8 bits with a scale for each block of up to 256 numbers, see `orchestrator.optim.blocks`.
An update computes the moments in fp32 from the codes and the gradient, changes the weights by them, and rounds them to
codes again. Embeddings and small parameters have AdamW's moments in fp32.

A second moment that is not zero never becomes zero. bitsandbytes and torchao round it to zero below 1.6e-7 of its
block's largest: that is a gradient of 4e-4 of the largest. The first moment of such a number keeps a code down to
2.8e-7 of the largest, and with a gradient of zero the next update would divide it by eps alone. With the smallest code
that update is smaller than AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from orchestrator.optim.blocks import Part, new_slot, parts_of
from orchestrator.optim.groups import groups_of_shards
from orchestrator.optim.kinds import MOMENTS_IN_8_BITS

if TYPE_CHECKING:
    from orchestrator.optim.build import OptimizerContext

MAX_NUMBERS_AT_ONCE = 2**22
"""Numbers of a parameter that are updated at once: some tens of bytes each are in memory meanwhile."""
MOMENTS = ("exp_avg", "exp_avg_sq")
EXPONENTS = 7
"""Powers of ten that the map spans."""
SMALLEST = 2.0**-126
"""The smallest scale that numbers are divided by: a block of zeros has the scale 0."""


def build(context: OptimizerContext) -> torch.optim.Optimizer:
    """See `orchestrator.optim.build`."""
    return AdamW8bit(context)


def dynamic_map(signed: bool) -> tuple[list[float], int]:
    """Return the 256 numbers in [-1, 1] that codes stand for, ascending, and which of them is zero.

    Each power of ten down to 1e-7 has twice as many numbers as the one below it, evenly spaced (Dettmers et al., 2022,
    section 1.3, and appendix F).
    """
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        bounds = np.linspace(0.1, 1.0, 2 ** (exponent + (not signed)) + 1)
        means = 10.0 ** (exponent - EXPONENTS + 1) * (bounds[:-1] + bounds[1:]) / 2
        values += [*means, *(-means if signed else ())]
    ordered = sorted(float(value) for value in values)
    return ordered, ordered.index(0.0)


class Codes:
    """Codes of 8 bits for numbers between -1 and 1, or between 0 and 1. The code 0 stands for zero.

    Without a sign only zero has the code 0, see the module's docstring.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        values, self._zero = dynamic_map(signed)
        self._signed = signed
        # Rotated, so that code 0 is zero and a state of all zero bytes is a state of zeros.
        self._values = torch.tensor(values[self._zero :] + values[: self._zero], device=device)
        # The nearest of 256 sorted numbers is the interval between two middles, found by binary search.
        middles = [(low + high) / 2 for low, high in pairwise(values)]
        self._middles = torch.tensor(middles, device=device)

    def numbers(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the numbers of blocks of codes [rows, blocks, width] with scales [rows, blocks], fp32.

        Args:
            codes: uint8 [rows, blocks, width].
            scales: the largest magnitude of each block, fp32 [rows, blocks].
        """
        return self._values[codes.int()].mul_(scales[..., None])

    def nearest(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Return the codes of the nearest numbers, as `numbers` takes them. The given numbers are overwritten.

        Args:
            numbers: fp32 [rows, blocks, width].
            scales: fp32 [rows, blocks].

        Returns:
            uint8 [rows, blocks, width].
        """
        smallest_code = None if self._signed else (numbers > 0).int()
        scaled = numbers.div_(scales.clamp_min(SMALLEST)[..., None])
        indices = torch.bucketize(scaled, self._middles, out_int32=True)
        if smallest_code is not None:
            indices.clamp_min_(smallest_code)
        return indices.sub_(self._zero).bitwise_and_(255).to(torch.uint8)


class AdamW8bit(torch.optim.Optimizer):
    """Groups with `in_8_bits` have moments in 8 bits; torch's AdamW updates the other groups."""

    def __init__(self, context: OptimizerContext) -> None:
        spec = context.spec
        groups: list[dict[str, Any]] = []
        for in_8_bits in (True, False):
            shards = [shard for shard in context.shards if (shard.name in context.in_8_bits) == in_8_bits]
            groups += [
                {**group, "in_8_bits": in_8_bits} for group in groups_of_shards(spec, shards, context.rate)
            ]
        # A rank without a shard still takes part in the maxima of the other ranks' blocks.
        if not groups:
            groups = [{"params": [], "lr": 0.0, "lr_scale": 1.0, "weight_decay": 0.0, "in_8_bits": True}]
        super().__init__(groups, {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps})
        adamw_groups = [group for group in self.param_groups if not group["in_8_bits"]]
        self._adamw = (
            torch.optim.AdamW(adamw_groups, betas=spec.betas, eps=spec.eps, fused=True)
            if adamw_groups
            else None
        )
        if self._adamw is not None:
            self._adamw.state = self.state  # both share one state per parameter, each with its own slots
        self._maxima = context.maxima
        self._parts = {
            shard.parameter: parts_of(shard) for shard in context.shards if shard.name in context.in_8_bits
        }
        self._cut = [
            part.column(column)
            for parts in self._parts.values()
            for part in parts
            for column in part.cut_columns
        ]
        self._numbers = [(part.shard.name, part.numbers()) for part in self._cut]
        self._device = context.device
        self._codes = Codes(True, self._device), Codes(False, self._device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients. All ranks call it together."""
        if self._adamw is not None:
            self._adamw.step()
        groups = {p: group for group in self.param_groups if group["in_8_bits"] for p in group["params"]}
        for p, parts in self._parts.items():
            state = self.state[p]
            for slot in MOMENTS_IN_8_BITS:
                if slot.name not in state:
                    state[slot.name] = new_slot(slot, parts[0].shard)
            state["step"] = state.get("step", torch.zeros((), device=p.device)) + 1
        scales = iter(self._cut_scales(groups))
        for p, parts in self._parts.items():
            for part in parts:
                cut_scales = {column: next(scales) for column in part.cut_columns}
                self._update(part, groups[p], cut_scales)

    def _cut_scales(self, groups: Mapping[Tensor, dict[str, Any]]) -> list[Tensor]:
        """Return the new scales [2, rows] of the blocks that other ranks hold numbers of, in the order of `_cut`."""
        scales = [torch.empty(2, 0, device=self._device)]
        for part in self._cut:
            for rows in _rows_at_once(part):
                moments = self._moments(part, rows, groups[part.shard.parameter])
                scales.append(_scales_of(moments)[..., 0])
        # One all-reduce for the whole step instead of one for each parameter.
        all_scales = self._maxima(self._numbers, torch.cat(scales, 1))
        return list(all_scales.split([part.rows for part in self._cut], 1))

    def _moments(self, part: Part, rows: slice, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the moments of some rows with the new gradient, fp32 [rows, blocks, width]; 0 for missing numbers."""
        p, state = part.shard.parameter, self.state[part.shard.parameter]
        assert p.grad is not None
        gradient = _blocks(part, part.rows_of(p.grad.contiguous())[rows])
        first, second = (
            codes.numbers(
                _blocks(part, part.rows_of(state[f"{moment}_code"])[rows]),
                part.scales_of(state[f"{moment}_scale"])[rows],
            )
            for codes, moment in zip(self._codes, MOMENTS, strict=True)
        )
        beta1, beta2 = group["betas"]
        # m = beta1 m + (1 - beta1) g, and v = beta2 v + (1 - beta2) g^2 (Loshchilov and Hutter, 2019, algorithm 2).
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return first, second

    def _update(self, part: Part, group: Mapping[str, Any], cut_scales: Mapping[int, Tensor]) -> None:
        """Update the weights of a part and its moments, some rows at a time."""
        p, state = part.shard.parameter, self.state[part.shard.parameter]
        beta1, beta2 = group["betas"]
        # In fp64 on the device: 1 - far**step has few digits of fp32 left, and reading the step would wait for a GPU.
        step = state["step"].double()
        # w -= lr m^ / (sqrt(v^) + eps), with m^ = m / (1 - beta1^t) in the rate and v^ = v / (1 - beta2^t) in the root.
        rate = group["lr"] / (1 - beta1**step)
        correction = (1 - beta2**step).sqrt()
        for rows in _rows_at_once(part):
            moments = self._moments(part, rows, group)
            first, second = moments
            weights = part.rows_of(p)[rows]
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            # The moments before they are rounded, as in the paper.
            update = second.sqrt().div_(correction).add_(group["eps"]).reciprocal_().mul_(first).mul_(rate)
            weights.sub_(_numbers_of(part, update))
            scales = _scales_of(moments)
            for column, block_scales in cut_scales.items():
                # A block that several ranks hold must have one scale, or its codes would depend on the layout.
                scales[..., column] = block_scales[:, rows]
            for codes, moment, numbers, scale in zip(self._codes, MOMENTS, moments, scales, strict=True):
                new_codes = _numbers_of(part, codes.nearest(numbers, scale))
                part.rows_of(state[f"{moment}_code"])[rows] = new_codes
                part.scales_of(state[f"{moment}_scale"])[rows] = scale


def _rows_at_once(part: Part) -> Iterator[slice]:
    """Yield the rows of a part in slices of up to MAX_NUMBERS_AT_ONCE numbers, or of one row that is longer."""
    count = max(1, MAX_NUMBERS_AT_ONCE // (part.width * (part.block_columns.stop - part.block_columns.start)))
    for begin in range(0, part.rows, count):
        yield slice(begin, begin + count)


def _blocks(part: Part, rows: Tensor) -> Tensor:
    """Return rows [rows, numbers] as blocks [rows, blocks, width], with zeros for numbers that are not here."""
    padded = pad(rows, (part.before, part.after)) if part.before or part.after else rows
    return padded.reshape(len(rows), -1, part.width)


def _numbers_of(part: Part, blocks: Tensor) -> Tensor:
    """Return blocks as rows: the inverse of `_blocks`."""
    rows = blocks.reshape(len(blocks), -1)
    return rows[:, part.before : rows.shape[1] - part.after]


def _scales_of(moments: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each block of both moments, [2, rows, blocks]."""
    return torch.stack([moment.abs().amax(-1) for moment in moments])

"""Weights in MXFP4: 4-bit numbers, 32 of which share a power of two (OCP Microscaling Formats 1.0, section 5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from workloads.model.stored import Part

GROUP = 32
"""Numbers that share a scale."""
BIAS = 127
"""The stored scale that means one."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers by their low three bits. The fourth bit is the sign."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors in which transformers stores one: uint8 [experts, out, groups, 16] and [experts, out,
groups].
"""


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers in bf16 [.., groups * 32], which represents them exactly.

    `blocks` is uint8 [.., groups, 16] with two numbers per byte, the first in the low bits; `scales` is uint8 [..,
    groups].
    """
    table = torch.tensor((*POSITIVE, *(-x for x in POSITIVE)), dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(table[pairs.int()], scales.int().unsqueeze(-1) - BIAS).flatten(-2)


class Source(Protocol):
    """Tensors of a checkpoint by name."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all tensors."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor."""

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of a tensor."""


class Unpacked:
    """The tensors of a source, with those in MXFP4 expanded to bf16 [experts, in, out]."""

    def __init__(self, source: Source) -> None:
        self._source = source
        known = frozenset(source.names)
        bases = {name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS)}
        self._packed = frozenset(base for base in bases if base + SCALES in known)
        stored = {base + end for base in self._packed for end in (BLOCKS, SCALES)}
        self.names = [*(name for name in source.names if name not in stored), *sorted(self._packed)]

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor."""
        shapes = dict(self._source.shapes)
        for base in self._packed:
            experts, out, groups = shapes[base + SCALES]
            shapes[base] = (experts, groups * GROUP, out)
        return shapes

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of one tensor. Reads only the groups of a packed tensor that overlap the part."""
        if name not in self._packed:
            return self._source.part(name, part)
        experts, inputs, out = part
        first = inputs.start // GROUP
        groups = slice(first, -(-inputs.stop // GROUP))
        blocks = self._source.part(name + BLOCKS, (experts, out, groups, slice(0, GROUP // 2)))
        unpacked = values(blocks, self._source.part(name + SCALES, (experts, out, groups)))
        start = inputs.start - first * GROUP
        return unpacked[..., start : start + inputs.stop - inputs.start].transpose(-2, -1)

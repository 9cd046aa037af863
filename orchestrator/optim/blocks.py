"""Blocks of a parameter, each with a scale for its 8-bit codes: up to 256 consecutive numbers of one row.

A row runs along the last dimension, so blocks and their scales depend on the parameter alone and not on the layout.
Where rows are multiples of 256 numbers long, as in most models, these are the blocks of Dettmers et al., 2022, "8-bit
Optimizers via Block-wise Quantization", section 2.1, and of bitsandbytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orchestrator.optim.kinds import BLOCK, Slot
from orchestrator.parallel.block_maxima import Numbers
from orchestrator.parallel.parameter_shard import Box, ParameterShard
from workloads.workload import Workload

MIN_NUMBERS = 4096
"""Parameters with fewer numbers keep fp32 moments, as in bitsandbytes: they save no memory worth an error."""
MIN_ROW_LENGTH = 8
"""Parameters with shorter rows keep fp32 moments too: two scales for fewer numbers save little or nothing."""


def names_in_8_bits(workload: Workload) -> frozenset[str]:
    """Return the parameters whose moments an 8-bit optimizer rounds: all but small ones and embeddings.

    Rows of rare tokens have gradients of zero for many steps, and then moments far below those of other rows (Dettmers
    et al., 2022, section 2.3). transformers.Trainer leaves embeddings in fp32 too.
    """
    embeddings = workload.embeddings
    return frozenset(
        name
        for name, shape in workload.shapes.items()
        if math.prod(shape) >= MIN_NUMBERS and shape[-1] >= MIN_ROW_LENGTH and name not in embeddings
    )


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter's scales: one for each block of each row."""
    return *shape[:-1], -(-shape[-1] // BLOCK)


def block_counts(workload: Workload, names: Container[str]) -> dict[str, int]:
    """Return the number of blocks of each of these parameters, in the order that all ranks have.

    Args:
        workload: has the shapes of all parameters.
        names: the parameters to count.
    """
    return {name: math.prod(scales_shape(shape)) for name, shape in workload.shapes.items() if name in names}


@dataclass(frozen=True)
class Part:
    """One box of a shard as rows of blocks, or one column of these blocks.

    Attributes:
        shard: the shard.
        scales: the box of this part's scales among those of the parameter. Its offset is that in the shard's scales.
        begin: index of the box's first number in the shard.
        rows: number of rows.
        length: numbers in a row.
        columns: the numbers of each row that belong to the part. A column of blocks has only some of them.
        block_columns: the blocks of each row that belong to the part.
        width: numbers in a block.
        before: numbers of the first block that are not in this box, because other ranks hold them.
        after: numbers of the last block that are not in this box: other ranks hold them, or the row has ended.
        cut_columns: the blocks of a row that other ranks hold numbers of: the first (0), the last (-1), both or none.
    """

    shard: ParameterShard
    scales: Box
    begin: int
    rows: int
    length: int
    columns: slice
    block_columns: slice
    width: int
    before: int
    after: int
    cut_columns: tuple[int, ...]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return the view [rows, numbers] of a tensor of the shard's size."""
        flat = tensor.view(-1)[self.begin : self.begin + self.rows * self.length]
        return flat.view(self.rows, self.length)[:, self.columns]

    def scales_of(self, scales: Tensor) -> Tensor:
        """Return the view [rows, blocks] of the shard's scales."""
        return scales_view(self.scales, scales).view(self.rows, -1)[:, self.block_columns]

    def column(self, index: int) -> Part:
        """Return the first (0) or the last (-1) block of every row."""
        blocks = self.scales.extent[-1]
        if blocks == 1:
            return self
        if index == 0:
            columns = slice(0, self.width - self.before)
            missing = (self.before, 0)
        else:
            columns = slice(self.length - (self.width - self.after), self.length)
            missing = (0, self.after)
        block = index % blocks
        return dataclasses.replace(
            self,
            columns=columns,
            block_columns=slice(block, block + 1),
            before=missing[0],
            after=missing[1],
            cut_columns=(0,),
        )

    def numbers(self) -> Numbers:
        """Return the number of the first of the blocks of each row among all blocks of the parameter, [rows]."""
        *leading, blocks = scales_shape(self.shard.cut.shape)
        every_row = np.arange(math.prod(leading), dtype=np.int64).reshape(leading)
        rows = every_row[self.scales.slices()[:-1]].reshape(-1)
        return rows * blocks + self.scales.start[-1] + self.block_columns.start


def parts_of(shard: ParameterShard) -> list[Part]:
    """Return the blocks of each of the shard's boxes, in their order."""
    parts: list[Part] = []
    offset = 0
    row_length = shard.cut.shape[-1]
    # A row that is shorter than a block is one block.
    width = min(BLOCK, row_length)
    for box in shard.boxes:
        length = box.extent[-1]
        start = box.start[-1]
        stop = box.start[-1] + length
        first = start // BLOCK
        last = -(-stop // BLOCK)
        blocks = last - first
        before = start - first * BLOCK
        # A block is cut if the box begins within it, or ends within it before the row does.
        cut = [0] * (before > 0) + [blocks - 1] * (stop < min(last * BLOCK, row_length))
        parts.append(
            Part(
                shard=shard,
                scales=Box((*box.start[:-1], first), (*box.extent[:-1], blocks), offset),
                begin=box.offset,
                rows=math.prod(box.extent[:-1]),
                length=length,
                columns=slice(0, length),
                block_columns=slice(0, blocks),
                width=width,
                before=before,
                after=blocks * width - before - length,
                cut_columns=tuple(sorted({0 if block == 0 else -1 for block in cut}, reverse=True)),
            )
        )
        offset += parts[-1].scales.size
    return parts


def new_slot(slot: Slot, shard: ParameterShard) -> Tensor:
    """Return a state tensor of a shard before its first update: all zeros. Scales are [number of blocks, 1].

    Args:
        slot: the state.
        shard: the parameter's part.
    """
    if slot.is_scale:
        # Two dimensions, so that no other code takes them for a tensor of the shard's shape.
        return shard.parameter.new_zeros(sum(part.scales.size for part in parts_of(shard)), 1)
    return torch.zeros_like(shard.parameter, dtype=torch.uint8 if slot.is_code else None)


def stored_shape(slot: Slot, shard: ParameterShard) -> tuple[int, ...]:
    """Return the shape of a state tensor of the whole parameter, as checkpoints hold it.

    Args:
        slot: the state.
        shard: the parameter's part.
    """
    return scales_shape(shard.cut.shape) if slot.is_scale else shard.cut.shape


def slot_views(slot: Slot, shard: ParameterShard, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of a shard's state tensor in that of the whole parameter, each with its view of `tensor`.

    Args:
        slot: the state.
        shard: the parameter's part.
        tensor: the state of this part.
    """
    if not slot.is_scale:
        yield from shard.views(tensor)
        return
    for part in parts_of(shard):
        yield part.scales, scales_view(part.scales, tensor)


def saved_views(slot: Slot, shard: ParameterShard, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield what `slot_views` does, but the scale of a cut block only to the shard with the block's first number.

    Args:
        slot: the state.
        shard: the parameter's part.
        tensor: the state of this part.
    """
    if not slot.is_scale:
        yield from shard.views(tensor)
        return
    for part in parts_of(shard):
        box, view = part.scales, scales_view(part.scales, tensor)
        if part.before:
            start = (*box.start[:-1], box.start[-1] + 1)
            box = Box(start, (*box.extent[:-1], box.extent[-1] - 1), box.offset)
            # The rank with the beginning of the block saves its scale; a piece that two ranks save would not tile the
            # tensor.
            view = view[..., 1:].contiguous()
        if box.size:
            yield box, view


def scales_view(box: Box, scales: Tensor) -> Tensor:
    """Return the view of a box in this rank's scales.

    Args:
        box: the box among the parameter's scales; its offset is that in this rank's scales.
        scales: this rank's scales, [number of blocks, 1].
    """
    return scales.view(-1)[box.offset : box.offset + box.size].view(box.extent)

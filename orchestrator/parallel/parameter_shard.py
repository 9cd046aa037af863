"""The part of a parameter that this rank updates, and the contract of data parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.partition import Cut


@dataclass(frozen=True)
class Box:
    """A box of the global tensor: `extent` at `start`. Its elements are at `offset` of the shard, in order."""

    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)

    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the full tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.extent, strict=True))

    def of(self, tensor: Tensor) -> Tensor:
        """The view of this box in the full tensor."""
        return tensor[self.slices()]


@dataclass(frozen=True)
class ParameterShard:
    """The part of a parameter that this rank's optimizer updates: a plain tensor, whose `grad` is the reduced gradient.

    Attributes:
        name: canonical name of the parameter.
        cut: this rank's part of the parameter, before data-parallel sharding.
        parameter: the shard.
        boxes: positions of the shard's elements in the global tensor.
        replica_group: the ranks that hold the same shard, because data parallelism does not divide it.
        counted: whether this rank counts the shard in norms; each element must count once.
        saved: whether a rank of `replica_group` saves it.
    """

    name: str
    cut: Cut
    parameter: nn.Parameter
    boxes: tuple[Box, ...]
    replica_group: ProcessGroup
    counted: bool
    saved: bool

    @property
    def matrix(self) -> bool:
        """Whether weight decay and trust ratios apply: not to vectors such as norms and biases."""
        return self.cut.matrix

    def views(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes with their views of `tensor`, which has the shard's size (weights or optimizer state)."""
        if len(self.boxes) == 1:  # most shards; a snapshot asks for all views after every step
            yield self.boxes[0], tensor.view(self.boxes[0].extent)
            return
        flat = tensor.view(-1)  # `view` never copies, so that writes to the views change `tensor`
        for box in self.boxes:
            yield box, flat[box.offset : box.offset + box.size].view(box.extent)

    def slices(self, tensor: Tensor) -> list[Tensor]:
        """Return [tensor], or for a stack of experts each expert's part of it, box by box."""
        if not self.cut.stack:
            return [tensor]
        return [part for _, view in self.views(tensor) for part in view.unbind()]

    def multiply(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """Multiply each of the `slices` of `tensor` by its factor in place, and return `tensor`.

        Args:
            tensor: of the shard's size; weights or optimizer state.
            factors: one for each of `slices`, [n].
        """
        if not self.cut.stack:
            return tensor.mul_(factors[0])
        first = 0
        for _, view in self.views(tensor):
            view.mul_(factors[first : first + len(view)].view(-1, *(1 for _ in view.shape[1:])))
            first += len(view)
        return tensor


class DataParallel(Protocol):
    """How the replicas of a model divide an update: the shards of each rank, and the reduction of gradients."""

    shards: list[ParameterShard]

    def begin(self) -> None:
        """Zero the gradients before a step."""

    def micro_batch(self, last: bool) -> None:
        """Called before a micro-batch's forward and backward pass; `last` is the last one of the step."""

    def finish(self) -> None:
        """Set every shard's `grad` to the sum over all ranks with different tokens."""

    def publish(self) -> None:
        """Send updated shards to all ranks that compute with them."""


def boxes_of(cut: Cut, begin: int, end: int) -> tuple[Box, ...]:
    """Return the elements [begin, end) of a cut's flattened part as boxes of the global tensor.

    A range of a row-major tensor consists of a part of a row, whole rows, and a part of a row; and each part of a row
    consists of the same, one dimension lower.

    Args:
        cut: the part of the global tensor that is flattened.
        begin: first element of the range, counted within the cut.
        end: element after the last one.
    """
    boxes: list[Box] = []

    def add(start: tuple[int, ...], extent: tuple[int, ...]) -> None:
        offset = sum(box.size for box in boxes)
        boxes.append(Box(tuple(a + b for a, b in zip(cut.start, start, strict=True)), extent, offset))

    def walk(prefix: tuple[int, ...], sizes: tuple[int, ...], low: int, high: int) -> None:
        if low >= high:
            return
        unit = (1,) * len(prefix)
        if low == 0 and high == math.prod(sizes):
            add((*prefix, *(0 for _ in sizes)), (*unit, *sizes))
            return
        # `first` is the first row that begins within the range, `last` the row in which the range ends.
        row_size = math.prod(sizes[1:])
        first = -(-low // row_size)
        last = high // row_size
        if first > last:  # within one row
            walk((*prefix, last), sizes[1:], low - last * row_size, high - last * row_size)
            return
        if low < first * row_size:
            walk((*prefix, first - 1), sizes[1:], low - (first - 1) * row_size, row_size)
        if last > first:
            add((*prefix, first, *(0 for _ in sizes[1:])), (*unit, last - first, *sizes[1:]))
        walk((*prefix, last), sizes[1:], 0, high - last * row_size)

    walk((), cut.extent, begin, end)
    return tuple(boxes)

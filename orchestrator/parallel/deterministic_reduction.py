"""Gradients whose bits do not depend on the data-parallel width.

The global batch is a fixed number of virtual shards, each computed as one micro-batch. Their gradients are summed in a
binary tree over the order of the shards: first those of a rank, which are neighbours, then over the ranks. An
all-to-all gives every rank one slice of all ranks' partial sums, which it adds in the same tree, and an all-gather
returns the sums. Together they send the bytes of a ring all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.parameters import LocalParameter


class DeterministicReduction:
    """A `DataParallel` in which every rank holds and updates all parameters."""

    def __init__(self, parameters: list[LocalParameter], mesh: Mesh, device: torch.device) -> None:
        self._group = mesh.data
        mine = mesh.data.index == 0
        with_boxes = [(local, boxes_of(local.cut, 0, local.parameter.numel())) for local in parameters]
        self.shards = [
            ParameterShard(
                local.name,
                local.cut,
                parameter=local.parameter,
                boxes=boxes,
                replica_group=mesh.data,
                counted=mine,
                saved=True,
            )
            for local, boxes in with_boxes
        ]
        size = sum(local.parameter.numel() for local in parameters)
        ways = self._group.size
        # Padded, so that the all-to-all has equal slices.
        self._flat = torch.zeros(-(-size // ways) * ways, device=device)
        offset = 0
        for local in parameters:
            local.parameter.grad = self._flat[offset : offset + local.parameter.numel()].view_as(
                local.parameter
            )
            offset += local.parameter.numel()
        self._sums: list[tuple[int, Tensor]] = []
        self._computed = False

    def begin(self) -> None:
        """See `DataParallel.begin`."""
        self._sums, self._computed = [], False

    def micro_batch(self, last: bool) -> None:
        """See `DataParallel.micro_batch`."""
        self._bank()
        self._flat.zero_()
        self._computed = True

    def finish(self) -> None:
        """See `DataParallel.finish`.

        Raises:
            ValueError: if the number of the rank's virtual shards is not a power of two.
        """
        self._bank()
        if len(self._sums) != 1:
            raise ValueError("a rank's virtual shards must be a power of two")
        _, total = self._sums.pop()
        self._group.sent(total)
        if not self._group.sums_gradients:
            return
        ways = self._group.size
        if ways == 1:
            self._flat.copy_(total)
            return
        slices = torch.empty_like(total)
        # And not a reduce-scatter, whose order of additions belongs to the library and changes with the number of
        # ranks.
        dist.all_to_all_single(slices, total, group=self._group.handle)
        mine = tree_sum(slices.view(ways, -1))
        dist.all_gather_single(self._flat, mine, group=self._group.handle)

    def publish(self) -> None:
        """Do nothing: every rank has made the same update."""

    def _bank(self) -> None:
        """Add the last shard's gradients to the tree, which holds at most one sum per level, like a binary counter."""
        if not self._computed:
            return
        level = 0
        # The next micro-batch accumulates into the same memory.
        total = self._flat.clone()
        while self._sums and self._sums[-1][0] == level:
            total.add_(self._sums.pop()[1])
            level += 1
        self._sums.append((level, total))
        self._computed = False


def tree_sum(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension: neighbours first, then neighbouring sums.

    The last of an odd number moves up a level. For a power of two, any cut into equal powers of two gives equal bits.
    """
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        sums = parts[0:even:2] + parts[1:even:2]
        parts = torch.cat((sums, parts[even:])) if even < len(parts) else sums
    return parts[0]

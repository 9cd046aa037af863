"""Matrices that are cut over ranks, brought together on one of them and given back in parts.

The matrices are dealt out over the replicas, so that each is worked on once a replica group and not on every rank
(Liu et al., 2025, "Muon is Scalable for LLM Training", section 2.3). Tensor-parallel ranks do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.train.parallel.mesh import Mesh, ProcessGroup
from orchestrator.train.parallel.parameter_shard import Box, ParameterShard
from orchestrator.train.parallel.partition import Cut


class FullMatrices:
    """The matrices of this rank's pipeline stages; of a stack of experts, those that its expert rank holds.

    `cuts` are those of the matrices by name, the same names on all ranks of the stages; `shards` are the parts that
    this rank updates, of some of them perhaps none.
    """

    def __init__(self, cuts: Mapping[str, Cut], shards: Sequence[ParameterShard], mesh: Mesh) -> None:
        self._cuts, self._mesh = cuts, mesh
        self._shards = {shard.name: shard for shard in shards if shard.name in cuts}
        self._is_sharded = mesh.layout.zero >= 1

    @property
    def names(self) -> Collection[str]:
        """The names of the matrices."""
        return self._cuts.keys()

    def changed(
        self, part_of: Callable[[ParameterShard], Tensor], change: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[ParameterShard, Tensor]]:
        """Each shard, and its part of what `change` makes of the full matrix of which `part_of` gives the part.

        `change` maps [.., rows, columns] to the same shape. All ranks call this together and take every item.
        """
        for number, (name, cut) in enumerate(self._cuts.items()):
            group = self._mesh.expert_data if cut.expert else self._mesh.data
            owner, shard = number % group.size, self._shards.get(name)
            local = torch.zeros(cut.extent, device=self._device())
            if shard is not None:
                part = part_of(shard)  # which moves the state of every copy
                for box, view in shard.views(part) if self._mesh.copies.index == 0 else ():
                    _of(box, cut, local).copy_(view)
            if self._is_sharded and group.size > 1:
                dist.reduce(local, group.ranks[owner], group=group.handle)
            if group.index == owner:
                local = self._over_tensor_ranks(local, cut, change)
            if group.size > 1:
                dist.broadcast(local, group.ranks[owner], group=group.handle)
            if shard is not None:
                found = torch.empty_like(shard.parameter)
                for box, view in shard.views(found):
                    view.copy_(_of(box, cut, local))
                yield shard, found

    def _over_tensor_ranks(self, local: Tensor, cut: Cut, change: Callable[[Tensor], Tensor]) -> Tensor:
        tp: ProcessGroup = self._mesh.tp
        if not cut.over_tp:
            return change(local).contiguous()
        experts = len(cut.shape) - 2  # a stack of them is cut over ranks that each keep their own
        shape = (*cut.extent[:experts], *cut.shape[experts:])
        mine = (*(slice(None) for _ in range(experts)), *cut.slices()[experts:])
        full = local.new_zeros(shape)
        full[mine] = local
        dist.all_reduce(full, group=tp.handle)
        return change(full)[mine].contiguous()

    def _device(self) -> torch.device:
        return next((s.parameter.device for s in self._shards.values()), torch.device("cpu"))


def _of(box: Box, cut: Cut, local: Tensor) -> Tensor:
    """The view of a box of the full tensor in the part that this rank computes with."""
    at = [slice(a - c, a - c + n) for a, c, n in zip(box.start, cut.start, box.extent, strict=True)]
    return local[tuple(at)]

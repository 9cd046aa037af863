"""Collects matrices that are sharded over ranks on one rank each, and returns the changed parts.

The matrices are distributed over the replicas, one at a time for each. A matrix is thus processed once per replica
group, and not on every rank (Liu et al., 2025, "Muon is Scalable for LLM Training", section 2.3). Tensor-parallel ranks
repeat the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parameter_shard import Box, ParameterShard
from orchestrator.parallel.partition import Cut


class FullMatrices:
    """The matrices of this rank's pipeline stages; of a stack of experts, those of its expert rank.

    Attributes:
        device: where matrices are updated: the rank's device, or its host if they are offloaded.
    """

    def __init__(
        self, cuts: Mapping[str, Cut], shards: Sequence[ParameterShard], mesh: Mesh, device: torch.device
    ) -> None:
        """Prepare the matrices.

        Args:
            cuts: the cut of each matrix by name; all ranks of the stages have the same names.
            shards: the parts that this rank updates; some matrices may have none here.
            mesh: the process groups.
            device: the rank's device.
        """
        self._cuts, self._mesh = cuts, mesh
        self.device = torch.device("cpu") if mesh.layout.offload != "none" else device
        self._shards = {shard.name: shard for shard in shards if shard.name in cuts}
        self._is_sharded = mesh.layout.zero >= 1

    @property
    def names(self) -> Collection[str]:
        """The names of the matrices."""
        return self._cuts.keys()

    def changed(
        self, part_of: Callable[[ParameterShard], Tensor], change: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[ParameterShard, Tensor]]:
        """Yield each shard with its part of a changed matrix. All ranks call this together and consume every item.

        Args:
            part_of: returns this rank's part of the matrix to change, for a shard.
            change: maps the full matrix, [.., rows, columns], to one of the same shape.
        """
        for group, matrices in self._rounds():
            mine: Tensor | None = None
            for owner, (name, cut) in enumerate(matrices):
                full = self._collected_on(owner, group, cut, self._part(name, part_of))
                mine = full if group.index == owner else mine
            if mine is not None:  # each owner changes its own matrix; owners work in parallel
                mine = self._over_tensor_ranks(mine, matrices[group.index][1], change)
            for owner, (name, cut) in enumerate(matrices):
                full = mine if mine is not None and group.index == owner else self._buffer(cut, torch.empty)
                if group.size > 1:
                    # All ranks of the group run the same broadcasts in the same order, also those without a shard of
                    # the matrix.
                    dist.broadcast(full, group.ranks[owner], group=group.handle)
                if (shard := self._shards.get(name)) is not None:
                    part = torch.empty_like(shard.parameter)
                    for box, view in shard.views(part):
                        view.copy_(_of(box, cut, full))
                    yield shard, part

    def _rounds(self) -> Iterator[tuple[ProcessGroup, Sequence[tuple[str, Cut]]]]:
        """Yield the matrices in rounds, each with its replica group. In a round a replica owns at most one matrix."""
        for expert in (False, True):
            group = self._mesh.expert_data if expert else self._mesh.data
            matrices = [(name, cut) for name, cut in self._cuts.items() if cut.expert == expert]
            for at in range(0, len(matrices), group.size):
                yield group, matrices[at : at + group.size]

    def _part(
        self, name: str, part_of: Callable[[ParameterShard], Tensor]
    ) -> tuple[ParameterShard, Tensor] | None:
        """Return this rank's shard of a matrix with the result of `part_of`; None without a shard.

        `part_of` also updates state, so every replica calls it.
        """
        shard = self._shards.get(name)
        return None if shard is None else (shard, part_of(shard))

    def _collected_on(
        self, owner: int, group: ProcessGroup, cut: Cut, part: tuple[ParameterShard, Tensor] | None
    ) -> Tensor | None:
        """Return the full matrix on its `owner`, collected from each replica's `part`; None on other ranks."""
        if not self._is_sharded and group.index != owner:
            return None
        full = self._buffer(cut, torch.zeros)
        # Under HSDP every copy of the model has all boxes: one copy fills them, or the sum would count them several
        # times.
        if part is not None and self._mesh.copies.index == 0:
            shard, values = part
            for box, view in shard.views(values):
                _of(box, cut, full).copy_(view)
        if self._is_sharded and group.size > 1:
            # Each replica fills its own boxes and leaves zeros elsewhere, so the sum assembles the matrix exactly.
            dist.reduce(full, group.ranks[owner], group=group.handle)
        return full if group.index == owner else None

    def _over_tensor_ranks(self, local: Tensor, cut: Cut, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `change` to the matrix that tensor-parallel ranks share, and return this rank's part.

        `local` is [.., rows, columns] of this rank. An all-reduce of zero-padded parts assembles the full matrix on
        every rank.
        """
        tp: ProcessGroup = self._mesh.tp
        # leading dimensions are a stack of experts, each kept whole by its own rank
        experts = len(cut.shape) - 2
        if cut.extent[experts:] == cut.shape[experts:]:
            return change(local).contiguous()
        shape = (*cut.extent[:experts], *cut.shape[experts:])
        mine = (*(slice(None) for _ in range(experts)), *cut.slices()[experts:])
        full = local.new_zeros(shape)
        full[mine] = local
        # Orthogonalisation needs the whole matrix: that of a part is not the part of the whole's.
        dist.all_reduce(full, group=tp.handle)
        return change(full)[mine].contiguous()

    def _buffer(self, cut: Cut, make: Callable[..., Tensor]) -> Tensor:
        return make(cut.extent, device=self.device)


def _of(box: Box, cut: Cut, local: Tensor) -> Tensor:
    """Return the view of a box, given in coordinates of the full tensor, in the part that this rank computes with."""
    at = [slice(a - c, a - c + n) for a, c, n in zip(box.start, cut.start, box.extent, strict=True)]
    return local[tuple(at)]

"""The largest values of blocks of numbers that several ranks hold parts of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.mesh import Mesh, ProcessGroup

Numbers = npt.NDArray[np.int64]
CutBlocks = Sequence[tuple[str, Numbers]]
"""Names of parameters, each with the numbers of blocks of it that this rank holds a part of."""
Maxima = Callable[[CutBlocks, Tensor], Tensor]
"""Maps values [.., n] of the n blocks, in their order, to their maxima over all ranks that hold parts of them."""


def own_maxima(blocks: CutBlocks, values: Tensor) -> Tensor:
    """Return the values of the only rank.

    Args:
        blocks: the blocks of this rank.
        values: their values, [.., n].
    """
    return values


class BlockMaxima:
    """Computes maxima by one small all-reduce in each group over which parameters are divided.

    Only blocks that some rank holds a part of take part. The ranks agree on them at the first call, so the blocks of a
    rank must be the same at every call.
    """

    def __init__(self, counts: Mapping[str, int], mesh: Mesh) -> None:
        """`counts`: the number of blocks of each parameter, those of other pipeline stages included."""
        self._first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        # Replicas without ZeRO and experts of different ranks have no block in common. Neither have stages: each holds
        # a tied parameter whole.
        groups = [mesh.tp, mesh.data] if mesh.layout.zero else [mesh.tp]
        self._groups = [group for group in groups if group.size > 1]
        self._agreed: tuple[Tensor, int] | None = None

    def __call__(self, blocks: CutBlocks, values: Tensor) -> Tensor:
        """See `Maxima`. All ranks that divide the same parameters call it together."""
        if self._agreed is None:
            mine = np.concatenate([np.empty(0, np.int64), *(self._first[name] + n for name, n in blocks)])
            everyone = union(mine, self._groups, values.device)
            indices = torch.from_numpy(np.searchsorted(everyone, mine)).to(values.device)
            self._agreed = indices, len(everyone)
        indices, count = self._agreed
        if not count:
            return values
        # Zero is neutral, because the values are maxima of magnitudes.
        maxima = values.new_zeros(*values.shape[:-1], count)
        # Two shards of a rank may have parts of one block, as on tied stages, hence a maximum and no assignment.
        maxima.scatter_reduce_(-1, indices.expand_as(values), values, "amax")
        for group in self._groups:
            with group.communicating():
                dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group.handle)
        return maxima[..., indices]


def union(numbers: Numbers, groups: Sequence[ProcessGroup], device: torch.device) -> Numbers:
    """Return the numbers that any rank of the groups has, ascending. All ranks call it together.

    Messages are tensors on `device`: on a GPU the groups have no other backend than NCCL.

    Args:
        numbers: numbers that this rank has, in any order.
        groups: the groups to merge over, one after the other: the union over a grid of ranks is that over its axes
            in turn.
        device: the device of the groups' backend.
    """
    merged = np.unique(numbers)
    for group in groups:
        # Ranks have different numbers of blocks, and an all-gather needs equal parts: sizes first, then rows padded to
        # the longest.
        sizes = torch.empty(group.size, dtype=torch.int64, device=device)
        dist.all_gather_single(sizes, torch.tensor([len(merged)], device=device), group=group.handle)
        padded = torch.zeros(int(sizes.max()), dtype=torch.int64, device=device)
        padded[: len(merged)] = torch.from_numpy(merged)
        everyone = torch.empty(group.size * len(padded), dtype=torch.int64, device=device)
        dist.all_gather_single(everyone, padded, group=group.handle)
        by_rank = everyone.view(group.size, -1).cpu().numpy()
        merged = np.unique(
            np.concatenate(
                [rank_numbers[:size] for rank_numbers, size in zip(by_rank, sizes.tolist(), strict=True)]
            )
        )
    return merged

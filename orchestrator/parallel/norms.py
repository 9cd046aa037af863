"""Norms of full tensors from the parts that ranks hold, each element counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.parameter_shard import ParameterShard


class GlobalNorms:
    """Computes the norm of each full parameter under any layout, and of each matrix in a stack of experts.

    Each rank adds the squares of its parts to a vector with one entry per norm, and one small all-reduce over all
    ranks sums the vectors.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], counts: Mapping[str, int], device: torch.device
    ) -> None:
        """Create the vector's index.

        Args:
            shards: this rank's shards.
            counts: number of norms of each parameter by canonical name, those of other pipeline stages included, so
                that the vectors of all ranks have the same length.
            device: the device of the shards; a rank may have none.
        """
        first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        entries = [[first[s.name] + n for n in _numbers(s)] for s in shards]
        counted = [
            float(s.counted) for s, shard_entries in zip(shards, entries, strict=True) for _ in shard_entries
        ]
        self._shards = shards
        self._size = sum(counts.values())
        self._lengths = [len(shard_entries) for shard_entries in entries]
        # The vector's entry of each slice of this rank, and whether the slice counts (1.0) or is a copy (0.0).
        self._entries = torch.tensor(
            [n for shard_entries in entries for n in shard_entries], dtype=torch.int64, device=device
        )
        self._counted = torch.tensor(counted, dtype=torch.float64, device=device)

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return fp32 norms for each shard in their order, one for each of its `slices`; `parts` are as large."""
        # fp64: the order in which an all-reduce adds changes the sum far below the rounding of the fp32 result.
        squares = torch.zeros(self._size, dtype=torch.float64, device=self._counted.device)
        slices = [
            values for shard, part in zip(self._shards, parts, strict=False) for values in shard.slices(part)
        ]
        if slices:
            mine = torch.stack(torch._foreach_norm(slices)).to(squares).square() * self._counted
            # Several shards of a rank may belong to one parameter, as on tied stages, hence a sum and no assignment.
            squares.index_add_(0, self._entries, mine)
        dist.all_reduce(squares)
        return list(squares[self._entries].sqrt().float().split(self._lengths))


def _numbers(shard: ParameterShard) -> Iterable[int]:
    """Return the numbers of the experts that the shard's slices belong to; (0,) if it is not a stack."""
    if not shard.cut.stack:
        return (0,)
    return [n for box in shard.boxes for n in range(box.start[0], box.start[0] + box.extent[0])]

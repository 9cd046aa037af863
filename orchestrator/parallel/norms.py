"""Norms of full tensors from the parts that ranks hold, each element counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.parameter_shard import ParameterShard


def squared_norm(shards: Iterable[ParameterShard]) -> Tensor:
    """This rank's summand of the squared global norm of the gradients, fp64 scalar."""
    counted = [s.parameter.grad for s in shards if s.counted and s.parameter.grad is not None]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(counted)).double().square().sum()


class GlobalNorms:
    """The norm of each full parameter, of a stack of experts that of each, under any layout, by one small all-reduce
    over all ranks.

    `counts` says how many norms each parameter has, those of other pipeline stages too, by its canonical name, so that
    every rank brings a vector of the same length. `device` is that of the shards, of which a rank may have none.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], counts: Mapping[str, int], device: torch.device
    ) -> None:
        first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        places = [[first[s.name] + n for n in _numbers(s)] for s in shards]
        counted = [float(s.counted) for s, found in zip(shards, places, strict=True) for _ in found]
        self._shards, self._size, self._lengths = shards, sum(counts.values()), list(map(len, places))
        self._places = torch.tensor([n for found in places for n in found], dtype=torch.int64, device=device)
        self._counted = torch.tensor(counted, dtype=torch.float64, device=device)

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """fp32 norms for each shard in their order, one for each of its `slices`."""
        squares = torch.zeros(self._size, dtype=torch.float64, device=self._counted.device)
        slices = [
            each for shard, part in zip(self._shards, parts, strict=False) for each in shard.slices(part)
        ]
        if slices:
            mine = torch.stack(torch._foreach_norm(slices)).to(squares).square() * self._counted
            squares.index_add_(0, self._places, mine)
        dist.all_reduce(squares)
        return list(squares[self._places].sqrt().float().split(self._lengths))


def _numbers(shard: ParameterShard) -> Iterable[int]:
    """Those of the experts that the shard's slices are of; 0 of what is no stack."""
    if not shard.cut.stack:
        return (0,)
    return [n for box in shard.boxes for n in range(box.start[0], box.start[0] + box.extent[0])]

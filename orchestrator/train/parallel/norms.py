"""Norms of full tensors from the parts that ranks hold, each element counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.train.parallel.parameter_shard import ParameterShard


def squared_norm(shards: Iterable[ParameterShard]) -> Tensor:
    """This rank's summand of the squared global norm of the gradients, fp64 scalar."""
    counted = [s.parameter.grad for s in shards if s.counted and s.parameter.grad is not None]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(counted)).double().square().sum()


class GlobalNorms:
    """The norm of each full parameter under any layout, by one small all-reduce over all ranks.

    `names` are the canonical names of all parameters, those of other pipeline stages too, so that every rank
    brings a vector of the same length. `device` is that of the shards, of which a rank may have none.
    """

    def __init__(self, shards: Sequence[ParameterShard], names: Iterable[str], device: torch.device) -> None:
        place = {name: i for i, name in enumerate(names)}
        self._size = len(place)
        self._places = torch.tensor([place[s.name] for s in shards], dtype=torch.int64, device=device)
        self._counted = torch.tensor([s.counted for s in shards], dtype=torch.float64, device=device)

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Norms as fp32 scalars, in the order of the shards."""
        squares = torch.zeros(self._size, dtype=torch.float64, device=self._counted.device)
        if len(parts):
            mine = torch.stack(torch._foreach_norm(list(parts))).to(squares).square() * self._counted
            squares.index_add_(0, self._places, mine)
        dist.all_reduce(squares)
        return list(squares[self._places].sqrt().float().unbind())

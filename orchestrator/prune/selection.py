"""The smallest elements of tensors that are divided over ranks: exactly the same ones under any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.parameter_shard import ParameterShard

LEAST, MOST = -(2**31), 2**31 - 1
"""The range of keys."""
FARTHEST = 2**48
"""No tensor has an index beyond this."""


def ordered(values: Tensor) -> Tensor:
    """Return int32 keys with the order of the fp32 `values`, in which -0 equals 0.

    The bits of a float, read as sign and magnitude, have the order of the floats; of negative ones the magnitude is
    inverted.
    """
    # -0.0 + 0.0 is 0.0, so that both zeros have one key.
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ MOST, bits)


def smallest(
    keys: Sequence[Tensor],
    shards: Sequence[ParameterShard],
    units: Sequence[Sequence[str]],
    counts: Sequence[int],
    device: torch.device,
) -> list[Tensor]:
    """Return for each shard a bool mask of its elements that are among the smallest of their unit.

    The k-th smallest key of a unit is found by bisection over the 32 bits of a key: the ranks count the keys up to a
    bound, and one all-reduce of a number per unit adds the counts. Among equal keys those first in the order of
    (position of the tensor in the unit, index in the whole tensor) are taken, so the choice depends on the values
    alone.

    Args:
        keys: int32 keys of this rank's shards, flat.
        shards: the shards.
        units: the names of the tensors whose elements are compared, the same on all ranks.
        counts: how many elements of each unit to take.
        device: the device of the shards; a rank may have none.
    """
    names = [name for unit in units for name in unit]
    number = {name: n for n, name in enumerate(names)}
    unit_of = [n for n, unit in enumerate(units) for _ in unit]
    tensors = [number[shard.name] for shard in shards]
    counts_of_units = torch.tensor(counts, dtype=torch.int64, device=device)
    of_unit = torch.tensor(unit_of, dtype=torch.int64, device=device)

    def count(tests: Callable[[int], Tensor]) -> Tensor:
        """Return how many elements of each tensor pass the test of their shard, over all ranks."""
        result = torch.zeros(len(names), dtype=torch.int64, device=device)
        for n, shard in enumerate(shards):
            if shard.counted:
                result[tensors[n]] += tests(n).sum()
        dist.all_reduce(result)
        return result

    def summed(each: Tensor) -> Tensor:
        return torch.zeros_like(counts_of_units).index_add_(0, of_unit, each)

    bounds = _lowest_true(
        torch.full_like(counts_of_units, LEAST),
        torch.full_like(counts_of_units, MOST),
        lambda bound: summed(count(lambda n: keys[n] <= bound[unit_of[tensors[n]]].int())) >= counts_of_units,
    )
    bound = [bounds[unit_of[tensor]].int() for tensor in tensors]
    # Everything below the bound is taken; only ties at it must be shared out.
    below = summed(count(lambda n: keys[n] < bound[n]))
    ties = count(lambda n: keys[n] == bound[n])
    ties_taken = _shared_out(ties, counts_of_units - below, unit_of)
    # Only where a tensor gives some of its ties does it matter which; only those are looked up.
    is_split = ((ties_taken > 0) & (ties_taken < ties)).tolist()
    indices = [
        _whole_indices(shard, keys[n] == bound[n])
        if is_split[tensors[n]]
        else keys[n].new_empty(0, dtype=torch.int64)
        for n, shard in enumerate(shards)
    ]
    last = torch.zeros_like(ties_taken)
    if any(is_split):
        last = _lowest_true(
            torch.full_like(ties_taken, -1),
            torch.full_like(ties_taken, FARTHEST),
            lambda bound: count(lambda n: indices[n] <= bound[tensors[n]]) >= ties_taken,
        )
    masks = []
    for n, tensor in enumerate(tensors):
        tied = keys[n] == bound[n]
        chosen = (keys[n] < bound[n]) | (tied & (ties_taken[tensor] == ties[tensor]))
        if is_split[tensor]:
            chosen[tied] = indices[n] <= last[tensor]
        masks.append(chosen)
    return masks


def _lowest_true(low: Tensor, high: Tensor, reached: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the least integer of each entry in [low, high] at which `reached` is true, which it is at `high`."""
    while bool((low < high).any()):
        # int64: the sum of two int32 bounds overflows int32. Floor, since bounds may be negative.
        middle = torch.div(low + high, 2, rounding_mode="floor")
        enough = reached(middle)
        low = torch.where(enough, low, torch.minimum(middle + 1, high))
        high = torch.where(enough, middle, high)
    return low


def _shared_out(available: Tensor, needed: Tensor, unit_of: Sequence[int]) -> Tensor:
    """Return how many of the `available` elements of each tensor are taken, so that each unit has `needed`.

    First tensors come first.
    """
    left = needed.tolist()
    result = []
    for count, unit in zip(available.tolist(), unit_of, strict=True):
        result.append(min(count, left[unit]))
        left[unit] -= result[-1]
    return torch.tensor(result, dtype=torch.int64, device=available.device)


def _whole_indices(shard: ParameterShard, chosen: Tensor) -> Tensor:
    """Return the index in the flattened whole tensor of the chosen elements of a shard, in their order."""
    result = []
    for box, view in shard.views(chosen):
        index = torch.zeros((), dtype=torch.int64, device=chosen.device)
        for start, extent, size in zip(box.start, box.extent, shard.cut.shape, strict=True):
            along = torch.arange(start, start + extent, device=chosen.device)
            index = index.unsqueeze(-1) * size + along
        result.append(index.reshape(-1)[view.reshape(-1)])
    return torch.cat(result)

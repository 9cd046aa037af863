"""The smallest elements of divided tensors against a sort of whole ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut
from orchestrator.prune.selection import ordered, smallest

ALONE = ProcessGroup((0,), 0, None)
CPU = torch.device("cpu")
VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-130, -3.0, 1.0000001]
"""Few values, so that there are ties; one is subnormal."""


@pytest.fixture(autouse=True, scope="module")
def _alone() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_, **__: None)
        yield


def parts_of(name: str, whole: Tensor, ways: int, by_column: bool) -> list[ParameterShard]:
    """A tensor in flat pieces, as ZeRO 1 has them; of a tensor-parallel rank's columns if asked."""
    rows, columns = whole.shape
    at = columns // 2 if by_column else columns
    cuts = [
        Cut((rows, columns), (0, start), (rows, size))
        for start, size in ((0, at), (at, columns - at))
        if size
    ]
    found = []
    for cut in cuts:
        part = whole[cut.slices()].reshape(-1)
        bounds = [len(part) * n // ways for n in range(ways + 1)]
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                piece = nn.Parameter(part[begin:end].clone())
                found.append(ParameterShard(name, cut, piece, boxes_of(cut, begin, end), ALONE, True, True))
    return found


def assembled(
    shards: list[ParameterShard], chosen: list[Tensor], shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    whole = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for shard, each in zip(shards, chosen, strict=True):
        for box, view in shard.views(each):
            box.of(whole[shard.name]).copy_(view)
    return whole


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.booleans(), st.booleans(), st.floats(0, 1))
def test_they_are_the_first_of_a_stable_sort_however_tensors_are_divided(
    data: st.DataObject, ways: int, by_column: bool, together: bool, share: float
) -> None:
    tensors = {
        name: torch.tensor(data.draw(st.lists(st.sampled_from(VALUES), min_size=size, max_size=size))).view(
            shape
        )
        for name, shape, size in (("a", (2, 3), 6), ("b", (4, 5), 20), ("c", (1, 7), 7))
    }
    shards = [part for name, whole in tensors.items() for part in parts_of(name, whole, ways, by_column)]
    units = [list(tensors)] if together else [[name] for name in tensors]
    counts = [round(share * sum(tensors[name].numel() for name in unit)) for unit in units]
    found = assembled(
        shards,
        smallest([ordered(s.parameter.detach()) for s in shards], shards, units, counts, CPU),
        {name: whole.shape for name, whole in tensors.items()},
    )
    for unit, count in zip(units, counts, strict=True):
        flat = torch.cat([tensors[name].flatten() for name in unit])
        first = torch.zeros(len(flat), dtype=torch.bool)
        first[flat.argsort(stable=True)[:count]] = True
        assert torch.cat([found[name].flatten() for name in unit]).equal(first)


def test_what_another_rank_counts_is_chosen_here_too_and_counts_once() -> None:
    whole = torch.tensor([[3.0, 1.0, 1.0, 2.0]])
    cut = Cut((1, 4), (0, 0), (1, 4))
    boxes = boxes_of(cut, 0, 4)
    mine, copy = (
        ParameterShard("a", cut, nn.Parameter(whole.clone()), boxes, ALONE, c, c) for c in (True, False)
    )
    found = smallest([ordered(whole).flatten()] * 2, [mine, copy], [["a"]], [2], CPU)
    assert [each.tolist() for each in found] == [[False, True, True, False]] * 2


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2))
def test_keys_have_the_order_of_floats(values: list[float]) -> None:
    floats = torch.tensor(values, dtype=torch.float32)
    keys = ordered(floats).long()
    below = floats[:, None] < floats[None]
    assert below.equal(keys[:, None] < keys[None])
    assert ordered(torch.tensor([-0.0])).equal(ordered(torch.tensor([0.0])))
    assert all(-(2**31) <= key < 2**31 for key in keys.tolist())
    assert ordered(torch.tensor([math.inf])).item() < 2**31 - 1

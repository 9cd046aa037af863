"""Boxes of a flat range, and who saves what."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut, span
from orchestrator.train.engines.state import shards_to_save


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_hold_exactly_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    cut = Cut(tuple(shape), (0,) * len(shape), tuple(shape))
    whole = torch.arange(size).view(shape)
    parts = []
    for box in boxes_of(cut, begin, end):
        assert box.offset == sum(len(p) for p in parts)
        parts.append(
            whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))].flatten()
        )
    assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(begin, end))


@given(st.integers(0, 24), st.data())
def test_each_expert_is_multiplied_by_its_own_factor(begin: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(begin, 24))
    cut = Cut((4, 3, 2), (0, 0, 0), (4, 3, 2), stack=True)
    whole, factors = torch.arange(24.0).view(4, 3, 2), torch.tensor([2.0, 3.0, 5.0, 7.0])
    part = whole.flatten()[begin:end].clone()
    boxes = boxes_of(cut, begin, end)
    shard = ParameterShard("p", cut, nn.Parameter(part), boxes, ProcessGroup((0,), 0, None), True, True)
    experts = [n for box in boxes for n in range(box.start[0], box.start[0] + box.extent[0])]
    assert [set((each // 6).flatten().tolist()) for each in shard.slices(part)] == [{n} for n in experts]
    wanted = (whole * factors.view(4, 1, 1)).flatten()[begin:end]
    assert torch.equal(shard.multiply(part, factors[experts]), wanted)


def test_boxes_stand_where_the_cut_stands() -> None:
    cut = Cut((6, 8), (2, 4), (2, 4))
    assert [(b.start, b.extent) for b in boxes_of(cut, 2, 8)] == [((2, 6), (1, 2)), ((3, 4), (1, 4))]


@given(st.integers(0, 50), st.integers(1, 9))
def test_spans_tile_the_whole(size: int, ways: int) -> None:
    spans = [span(size, index, ways) for index in range(ways)]
    assert [start for start, _ in spans] == [sum(n for _, n in spans[:i]) for i in range(ways)]
    assert sum(n for _, n in spans) == size
    assert max(n for _, n in spans) - min(n for _, n in spans) <= 1


def test_replicas_divide_the_writing() -> None:
    ranks = (0, 2, 4)
    sizes = [64, 32, 32, 16, 8, 8]
    by_rank = []
    for index in range(3):
        shards = [
            ParameterShard(f"p{i}", cut := Cut((n,), (0,), (n,)), nn.Parameter(torch.zeros(n)), boxes_of(cut, 0, n),
                  ProcessGroup(ranks, index, None), True, i != 5)
            for i, n in enumerate(sizes)
        ]  # fmt: skip
        by_rank.append([s.name for s in shards_to_save(shards)])
    assert sorted(name for names in by_rank for name in names) == ["p0", "p1", "p2", "p3", "p4"]
    assert by_rank[0] == ["p0"]

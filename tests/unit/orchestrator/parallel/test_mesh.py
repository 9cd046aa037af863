"""The groups of a layout, on one rank of a group that sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rendezvous import recorded

from orchestrator.parallel.device import COLLECTIVE_TIMEOUT
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh


def test_groups_of_some_ranks_wait_as_long_as_that_of_all() -> None:
    with recorded(1, 8), mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        mesh = Mesh(Layout(pp=2, dp=2, tp=2))
    assert (mesh.tp.ranks, mesh.data.ranks, mesh.pp.ranks) == ((0, 1), (1, 3), (1, 5))
    assert len(made.call_args_list) == 3, "none of other ranks"
    assert {call.args[1] for call in made.call_args_list} == {COLLECTIVE_TIMEOUT}


LAYOUTS = (
    Layout(pp=2, dp=2, cp=2, tp=2),
    Layout(dp=8, zero=3, shard=2),
    Layout(dp=8, ep=2, zero=3, shard=4),
    Layout(dp=4, cp=2, ep=4, zero=2, shard=4),
    Layout(pp=2, dp=4, ep=2, zero=2, shard=2, tp=2),
    Layout(pp=3, dp=2, cp=2, tp=2, ep=2),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_group_holds_the_ranks_that_share_what_it_does_not_divide(layout: Layout) -> None:
    """By definition: ranks are in one group if the coordinates that the group does not divide are equal."""
    ep, ways = layout.ep, layout.sharded

    def copy(p: dict[str, int]) -> tuple[int, int]:
        return divmod(p["dp"] * layout.cp + p["cp"], ways)

    shared: dict[str, Callable[[dict[str, int]], Any]] = {
        "world": lambda p: (),
        "tp": lambda p: (p["pp"], p["dp"], p["cp"]),
        "cp": lambda p: (p["pp"], p["dp"], p["tp"]),
        "pp": lambda p: (p["dp"], p["cp"], p["tp"]),
        "data": lambda p: (p["pp"], p["tp"]),
        "expert": lambda p: (p["pp"], p["dp"] // ep, p["cp"], p["tp"]),
        "expert_data": lambda p: (p["pp"], p["dp"] % ep, p["tp"]),
        "shard": lambda p: (p["pp"], p["tp"], copy(p)[0]),
        "copies": lambda p: (p["pp"], p["tp"], copy(p)[1]),
        "expert_shard": lambda p: (p["pp"], p["tp"], p["dp"] % ep, copy(p)[0]),
    }
    for rank in range(layout.world):
        with recorded(rank, layout.world):
            mesh = Mesh(layout)
            for name, key in shared.items():
                mine = key(layout.coordinate(rank))
                wanted = [r for r in range(layout.world) if key(layout.coordinate(r)) == mine]
                group = getattr(mesh, name)
                assert list(group.ranks) == wanted, (name, rank)
                assert group.ranks[group.index] == rank
                assert group.handle is not None or len(wanted) == 1
            ends = mesh.stage_group(frozenset({0, layout.pp - 1}))
            place = layout.coordinate(rank)
            stages = sorted({0, layout.pp - 1}) if place["pp"] in (0, layout.pp - 1) else [place["pp"]]
            assert list(ends.ranks) == [layout.rank(**{**place, "pp": stage}) for stage in stages]


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(pp=4), Layout(pp=4, dp=2, ep=2)], ids=str)
def test_every_rank_makes_as_many_groups(layout: Layout) -> None:
    """torch names a group by its ranks and by how many groups the process has made. Where these numbers differ, members
    of a later group have different names for it, and each waits for the others for ever."""
    counts = set()
    for rank in range(layout.world):
        with recorded(rank, layout.world), mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
            mesh = Mesh(layout)
            for stages in (
                {0, layout.pp - 1},
                {0, layout.pp - 1},
                {0},
                set(range(layout.pp)),
                {0, 1} if layout.pp > 1 else {0},
            ):
                mesh.stage_group(frozenset(stages))
            counts.add(len(made.call_args_list))
            assert all(call.kwargs["use_local_synchronization"] for call in made.call_args_list)
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("world", "offload", "wanted"),
    [
        ("cpu:gloo,cuda:nccl", "none", "cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "optimizer", None),  # whose tensors are the host's
        ("cpu:gloo,cuda:gloo", "none", None),
    ],
)
def test_groups_on_gpus_have_nccl_alone(world: str, offload: str, wanted: str | None) -> None:
    asked = []
    make = dist.new_group

    def made(ranks: list[int], timeout: timedelta, backend: str | None, **rest: Any) -> Any:
        asked.append(backend)
        return make(ranks, timeout, **rest)

    with (
        recorded(1, 8),
        mock.patch.object(dist, "get_backend_config", return_value=world),
        mock.patch.object(dist, "new_group", made),
    ):
        Mesh(Layout(pp=2, dp=2, tp=2, offload=offload)).stage_group(frozenset({0}))
    assert asked == [wanted] * 3


@pytest.mark.parametrize(
    ("layout", "connected"),
    [
        (Layout(pp=2, dp=2, tp=2), ["world", "tp", "pp", "data"]),
        (Layout(dp=8, ep=2, zero=3, shard=4), ["world", "expert", "shard", "copies", "expert_shard"]),
        (Layout(dp=8, ep=2, zero=3, shard=2), ["world", "expert", "copies"]),
        (Layout(pp=2, dp=4, ep=2, zero=2, shard=2), ["world", "pp", "expert", "copies"]),
        (Layout(dp=4, ep=2), ["world", "expert", "expert_data"]),
    ],
    ids=str,
)
def test_groups_that_a_step_does_not_use_get_no_communicator_at_the_start(
    layout: Layout, connected: list[str]
) -> None:
    """`tests/bench/bench_groups.py --used` counts what real ranks use. The groups themselves are made, see above."""
    with recorded(1, layout.world):
        mesh = Mesh(layout)
        with mock.patch.object(torch, "ones"), mock.patch.object(dist, "all_reduce") as sums:
            mesh.connect(torch.device("cuda"))
        handles = [call.kwargs["group"] for call in sums.call_args_list]
        assert set(handles) == {getattr(mesh, name).handle for name in connected}
        assert len(handles) == len(connected)
        assert mesh.data.handle is not None

"""What a gang of Ray actors makes of what Ray says; the rest of it is tested on real nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError
from stand_in_ray import GRANT, READY, StandInRay, stand_in_ray

from cluster.workers.gang import Bundle, Cause, RankStatus
from cluster.workers.ray_gang import RayGang
from cluster.workers.worker_group import ANSWER_TIMEOUT, GroupSpec, WorkerGroup, shares


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfMemoryError("Memory on the node was 2.87GB / 2.93GB"), Cause("starved", name="place")),
        (ActorDiedError(), Cause("lost", name="place")),
    ],
)
def test_a_place_that_ray_ended_for_want_of_memory_is_told_from_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: RayError, cause: Cause
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "get", refuse)
    host = SimpleNamespace(cause=SimpleNamespace(remote=lambda place, pid: None))
    gang = RayGang()
    try:
        spec = GroupSpec(ranks=1, bundle=Bundle(), target="")
        group: Any = WorkerGroup(SimpleNamespace(), spec, hosts=(host,), locations=(("node", "127.0.0.2"),))
        gang._slots = [(group, 0)]
        assert gang._cause(RankStatus(0, "127.0.0.2", 1, "dead"))[0] == cause
    finally:
        gang._heartbeats.close()


def test_workers_beyond_those_to_keep_are_released_and_those_of_ranks_are_not() -> None:
    """Else rollout workers and other runs never get their room."""
    released: list[str] = []

    def made(name: str) -> Any:
        return SimpleNamespace(locations=[name], release=lambda: released.append(name))

    gang = RayGang()
    try:
        gang._groups = [made("a"), made("b"), made("c")]
        gang._pending = [made("coming")]
        gang._slots = [(gang._groups[1], 0), (gang._groups[2], 0)]
        gang.prewarm(4)
        assert released == []
        gang.prewarm(2)
        assert released == ["coming", "a"]
        gang.prewarm(1)
        assert (released, gang.ready()) == (["coming", "a"], 2)
    finally:
        gang._heartbeats.close()


@pytest.fixture
def gang_of_many() -> Iterator[tuple[StandInRay, RayGang]]:
    """A gang of 40 groups of 8 ranks, on a node each."""
    with stand_in_ray(40, 8) as of:
        gang = RayGang()
        try:
            gang.start(320, Bundle(cpu=1), "module:function", {"of": "all"}, ranks_per_group=8)
            yield of, gang
        finally:
            gang._heartbeats.close()


def test_groups_are_waited_for_together_and_get_the_configuration_once(
    gang_of_many: tuple[StandInRay, RayGang],
) -> None:
    of, gang = gang_of_many
    assert gang.ready() == 320
    assert of.clock.monotonic() < 40 * GRANT + READY + 0.1, "each group costs a wait of its own"
    assert of.queries == 2, "each group costs a query of all nodes"
    assert [rank["rank_info"]["rank"] for rank, _, _ in of.launched] == list(range(320))
    assert all("config" not in rank and config == {"of": "all"} for rank, config, _ in of.launched)


def test_a_group_on_one_node_has_one_actor_and_one_spread_over_nodes_one_for_each_rank(
    gang_of_many: tuple[StandInRay, RayGang],
) -> None:
    of, gang = gang_of_many
    assert len({host for group, _ in gang._slots for host in group.hosts}) == of.actors == 40
    group, _ = gang._slots[8]
    assert [group.host_of(index) for index in range(8)] == [(group.hosts[0], index) for index in range(8)]
    spread = dataclasses.replace(group, hosts=tuple("abcdefgh"))
    assert [spread.host_of(index) for index in range(8)] == [(name, 0) for name in "abcdefgh"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "parts"),
    [
        ("4,5,6,7", 4, ["4", "5", "6", "7"]),
        ("0", 1, ["0"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 2, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        ("", 1, [""]),
        ("", 8, [""] * 8),
    ],
)
def test_each_rank_of_an_actor_sees_its_own_gpus(gpus: str, ranks: int, parts: list[str]) -> None:
    """Otherwise all take the first; ranks that share a GPU are refused when they join."""
    assert shares(gpus, ranks) == parts


def test_of_the_ranks_of_a_dead_node_only_the_first_is_waited_for(
    gang_of_many: tuple[StandInRay, RayGang],
) -> None:
    of, gang = gang_of_many
    of.dead = {of.names[1]}
    times = [of.clock.monotonic()]
    for rank in range(8, 16):
        assert gang._cause(RankStatus(rank, "at-node-00001", 1, "dead"))[0] == Cause("lost", name="place")
        times.append(of.clock.monotonic())
    first, *others = np.diff(times)
    assert first >= ANSWER_TIMEOUT
    assert max(others) < 0.1
    assert gang.lost_nodes() == {"at-node-00001"}


def test_all_missing_groups_for_which_there_is_room_are_requested_together() -> None:
    with stand_in_ray(6, 8) as of:
        gang = RayGang()
        try:
            gang.start(8, Bundle(cpu=1), "module:function", {}, ranks_per_group=8)
            gang._target_workers = 32
            gang._check_nodes()
            assert gang.occupied_workers() == 8
            of.clock.sleep(1.0)
            assert (gang.occupied_workers(), gang.ready()) == (32, 8)
            of.clock.sleep(1.0)
            assert (gang.occupied_workers(), gang.ready()) == (32, 32)
            gang._target_workers = 80
            gang._check_nodes()
            of.clock.sleep(1.0)
            gang.occupied_workers()
            of.clock.sleep(1.0)
            assert gang.occupied_workers() == 48, "more than there is room for"
        finally:
            gang._heartbeats.close()

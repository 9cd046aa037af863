"""What a gang of Ray actors makes of what Ray says; the rest of it is tested on real nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError
from stand_in_ray import GRANT, READY, StandInRay, stand_in_ray

from cluster.workers import ray_gang
from cluster.workers.gang import Bundle, Cause, RankStatus
from cluster.workers.ray_gang import DIVIDED_AFTER, RayGang
from cluster.workers.worker_group import (
    ANSWER_TIMEOUT,
    WorkerGroup,
    WorkerSpec,
    group_sizes,
    shares,
    threads_of_rank,
)


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
        spec = WorkerSpec(bundle=Bundle(), target="")
        group: Any = WorkerGroup(SimpleNamespace(), spec, hosts=(host,), locations=(("node", "127.0.0.2"),))
        gang._slots = [(group, 0)]
        assert gang._cause(RankStatus(0, "127.0.0.2", 1, "dead"))[0] == cause
    finally:
        gang._heartbeats.close()


ONE = Bundle(cpu=1)
TARGET = "module:function"


@contextlib.contextmanager
def stand_in_gang(node_count: int, ranks: int) -> Iterator[tuple[StandInRay, RayGang]]:
    """A gang on nodes with room for so many ranks each."""
    with stand_in_ray(node_count, ranks) as of:
        gang = RayGang()
        try:
            yield of, gang
        finally:
            gang._heartbeats.close()


def sizes(gang: RayGang) -> list[int]:
    """The ranks of each group in which the present attempt has ranks."""
    return [group.ranks for group in dict.fromkeys(group for group, _ in gang._slots)]


def until_ready(of: StandInRay, gang: RayGang) -> None:
    """Let the pending workers start."""
    for _ in range(3):
        of.clock.sleep(2 * READY)
        gang._check_nodes()


def test_workers_beyond_those_to_keep_are_released_and_those_of_ranks_are_not() -> None:
    """Else rollout workers and other runs never get their room."""
    with stand_in_gang(3, 4) as (of, gang):
        gang.start(4, ONE, TARGET, {})
        gang.prewarm(12)
        until_ready(of, gang)
        assert (gang.ready(), gang.capacity(ONE), of.actors) == (12, 12, 3)
        gang.prewarm(8)
        assert (gang.ready(), gang.capacity(ONE), of.actors) == (8, 12, 3)
        gang.prewarm(5)  # 3 of a group of 4 are too many
        assert (gang.ready(), gang.occupied_workers()) == (4, 4)
        until_ready(of, gang)
        assert (gang.ready(), gang.occupied_workers(), of.actors) == (5, 5, 4)
        gang.prewarm(1)
        assert (gang.ready(), gang.capacity(ONE)) == (4, 12)


@pytest.fixture(params=[8, 1])
def gang_of_many(request: pytest.FixtureRequest) -> Iterator[tuple[StandInRay, RayGang]]:
    """A gang of 40 groups of 8 ranks, on a node each. They share it because they should, or because there is room."""
    with stand_in_gang(40, 8) as (of, gang):
        gang.start(320, ONE, TARGET, {"of": "all"}, ranks_per_group=request.param)
        yield of, gang


def test_groups_are_waited_for_together_and_get_the_configuration_once(
    gang_of_many: tuple[StandInRay, RayGang],
) -> None:
    of, gang = gang_of_many
    assert gang.ready() == 320
    assert of.clock.monotonic() < 40 * GRANT + READY + 0.1, "each group costs a wait of its own"
    assert of.queries == 2, "each group costs a query of all nodes"
    assert [rank["rank_info"]["rank"] for rank, _, _ in of.launched] == list(range(320))
    assert all("config" not in rank and config == {"of": "all"} for rank, config, _ in of.launched)


@pytest.mark.parametrize(
    ("workers", "room", "together", "wanted"),
    [
        (16, [8, 8, 8], 1, [8, 8]),
        (10, [3, 8, 4], 1, [8, 2]),
        (16, [8, 4, 0], 8, [8, 8]),
        (8, [6, 7], 4, [4, 4]),
        (4, [1, 1], 1, [1, 1, 1, 1]),
        (4, [3, 3], 4, [4]),
        (3, [], 1, [1, 1, 1]),
    ],
)
def test_groups_are_as_large_as_the_room_of_nodes_and_the_rest_as_small_as_they_may_be(
    workers: int, room: list[int], together: int, wanted: list[int]
) -> None:
    assert group_sizes(workers, room, together) == wanted


def test_a_gang_that_shrinks_by_one_rank_gives_back_one_worker_and_keeps_the_other_groups() -> None:
    with stand_in_gang(3, 8) as (of, gang):
        gang.start(24, ONE, TARGET, {})
        gang.stop()
        gang.start(23, ONE, TARGET, {})
        gang.prewarm(23)
        assert (sorted(sizes(gang)), gang.ready(), of.actors) == ([7, 8, 8], 23, 4)
        gang.stop()
        gang.start(24, ONE, TARGET, {})
        assert (sorted(sizes(gang)), gang.ready(), of.actors) == ([1, 7, 8, 8], 24, 5)
        locations = [group.locations[index] for group, index in gang._slots]
        assert [node for node, _ in locations] == [name for name in of.names for _ in range(8)]
        gang.stop()
        gang.start(8, ONE, TARGET, {})
        assert (sizes(gang), of.actors) == ([8], 5), "a ready group of the right size is used"
        gang.stop()
        gang.start(1, ONE, TARGET, {})
        assert (sizes(gang), of.actors) == ([1], 5)


def test_the_next_layout_uses_the_same_actors_where_its_groups_fit() -> None:
    """Their imports are done."""
    with stand_in_gang(2, 8) as (of, gang):
        for together, actors in ((1, 2), (8, 2), (2, 2)):
            gang.start(16, ONE, TARGET, {}, ranks_per_group=together)
            assert (sizes(gang), of.actors) == ([8, 8], actors)
            gang.stop()
        gang.start(12, ONE, TARGET, {}, ranks_per_group=3)  # 8 ranks are no groups of 3
        assert (sizes(gang), of.actors) == ([6, 6], 4)


def test_a_group_is_divided_where_others_have_taken_a_part_of_its_room() -> None:
    """Ray's view of the free room is late."""
    with stand_in_gang(2, 8) as (of, gang):
        for name in of.names:
            of.occupy(name, 3, seen=0.5)
        gang.start(10, ONE, TARGET, {})
        assert sizes(gang) == [2, *[1] * 8]
        assert of.clock.monotonic() < DIVIDED_AFTER + READY + 0.2


def test_groups_that_wait_for_their_grant_are_not_divided_while_a_node_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray grants one after the other, which takes seconds for thousands."""
    monkeypatch.setattr(ray_gang, "DIVIDED_AFTER", 0.1)
    with stand_in_gang(300, 2) as (of, gang):
        gang.start(600, ONE, TARGET, {})
        assert (sizes(gang), of.actors) == ([2] * 300, 300)


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


@pytest.mark.parametrize(
    ("threads", "cpus", "ranks", "wanted"),
    [("8", 8.0, 8, "1"), ("8", 8.0, 2, "4"), ("3", 8.0, 8, "3"), ("1", 0.8, 8, "1")],
)
def test_a_rank_has_its_share_of_the_threads_that_ray_gives_an_actor(
    threads: str, cpus: float, ranks: int, wanted: str
) -> None:
    """Its child processes inherit them. What the user has set stays."""
    assert threads_of_rank(threads, cpus, ranks) == wanted


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
    with stand_in_gang(6, 8) as (of, gang):
        gang.start(8, ONE, TARGET, {}, ranks_per_group=8)
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

"""A gang on several real nodes: where ranks are, what survives an attempt, and how soon a loss is seen."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.workers import nodes
from cluster.workers.gang import Bundle, Cause, GangStatus
from cluster.workers.ray_gang import RayGang

ONE, HALF = Bundle(1), Bundle(0.5)
WAIT = "targets:wait"


@pytest.fixture
def gang(cluster: Cluster) -> Iterator[RayGang]:
    """A gang that leaves nothing behind."""
    mark = uuid.uuid4().hex
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "GANG_OF_TEST": mark}
    ray.init(address=cluster.address, logging_level="warning", runtime_env={"env_vars": environment})
    found = RayGang()
    try:
        yield found
    finally:
        found.close()
        ray.shutdown()
    deadline = time.monotonic() + 20
    while left := processes(mark):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def processes(mark: str) -> set[str]:
    """The fork servers and ranks of a gang, with their process ids; other tests run beside this one."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "cluster.workers.fork_server" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):
                if process.environ().get("GANG_OF_TEST") == mark:
                    found.add(f"{process.pid} {' '.join(words[-3:])}")
    return found


def until(gang: RayGang, seen: Callable[[GangStatus], bool]) -> GangStatus:
    deadline = time.monotonic() + 60
    while not seen(beat := gang.poll(0, 0.02)):
        assert time.monotonic() < deadline, beat
        assert not [rank for rank in beat.ranks if rank.state == "failed"], beat
    return beat


def running(beat: GangStatus) -> bool:
    return all(rank.step == 1 for rank in beat.ranks)


def seconds(gang: RayGang, act: Callable[[], Any], seen: Callable[[GangStatus], bool]) -> float:
    """From the act to the beat that shows it."""
    began = time.monotonic()
    act()
    until(gang, seen)
    return time.monotonic() - began


@pytest.mark.slow
def test_places_are_made_ready_beside_running_ranks_and_the_next_attempt_uses_the_same_at_once(
    gang: RayGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot be placed is told in time, which takes no place."""
    with monkeypatch.context() as soon:
        soon.setattr("cluster.workers.ray_gang.PLACEMENT_TIMEOUT", 1.0)
        with pytest.raises(TimeoutError, match="no room for 3 of 3 groups of 1 worker with") as refused:
            gang.start(3, Bundle(64), WAIT, {})
        addresses = sorted(node.address for node in nodes.alive())
        assert str(refused.value).endswith(f"; there is room for 0 on {addresses[0]}, 0 on {addresses[1]}")
    gang.start(1, ONE, WAIT, {})
    until(gang, running)
    assert (gang.ready(), gang.capacity(ONE)) == (1, 2)
    gang.prewarm(2)
    until(gang, lambda beat: gang.ready() == 2)
    listed = psutil.process_iter(["cmdline"])
    there = {p.pid for p in listed if "cluster.workers.fork_server" in " ".join(p.info["cmdline"] or [])}
    gang.stop()

    gang.start(2, ONE, WAIT, {})
    first = until(gang, running)
    assert {psutil.Process(rank.pid).ppid() for rank in first.ranks} <= there  # nothing is imported anew
    assert len({rank.node for rank in first.ranks}) == 2
    took = seconds(
        gang, lambda: os.kill(first.ranks[1].pid, signal.SIGKILL), lambda beat: beat.ranks[1].state == "dead"
    )
    assert took < 5  # an answer of Ray's about a lost worker may take longer; a connection that ends does not
    assert gang.poll(0).ranks[1].error == "process ended with exit code -9"
    gang.stop()
    held = gang.ready()
    gang.start(2, ONE, WAIT, {})
    second = until(gang, running)
    assert [r.node for r in second.ranks] == [r.node for r in first.ranks]
    assert held == gang.ready() == 2
    assert not {r.pid for r in first.ranks} & {r.pid for r in second.ranks}


@pytest.mark.slow
def test_a_lost_node_is_seen_and_avoided_and_what_is_left_is_used(gang: RayGang, cluster: Cluster) -> None:
    assert gang.capacity(ONE) == 2
    gang.start(2, ONE, WAIT, {})
    beat = until(gang, running)
    lost_nodes = next(n for n in cluster.worker_nodes if n.node_ip_address == beat.ranks[1].node)
    cluster.remove_node(lost_nodes, allow_graceful=False)
    beat = until(gang, lambda beat: beat.ranks[1].state == "dead" and beat.ranks[1].error != "")
    assert "gone" in beat.ranks[1].error or "no answer" in beat.ranks[1].error
    gang.stop()
    deadline = time.monotonic() + 40
    while gang.capacity(ONE) != 1:  # the other node is suspected too, if it answers late
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gang.start(1, ONE, WAIT, {})
    assert until(gang, running).ranks[0].node == beat.ranks[0].node


@pytest.mark.slow
def test_a_place_that_answers_again_is_used_again(gang: RayGang) -> None:
    """As after a network was cut and mended; what runs there waits, since nobody could tell it to end."""
    gang.start(2, ONE, WAIT, {})
    fork_server = psutil.Process(until(gang, running).ranks[1].pid).parent()
    assert fork_server is not None
    host = fork_server.parent()
    assert host is not None
    host.suspend()
    try:
        gang.stop()
        assert (gang.capacity(ONE), gang.ready()) == (1, 1)
    finally:
        host.resume()
    deadline = time.monotonic() + 20
    while gang.capacity(ONE) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (gang.ready(), gang.lost_nodes()) == (2, set())
    gang.start(2, ONE, WAIT, {})
    beat = until(gang, running)
    assert fork_server in [psutil.Process(rank.pid).parent() for rank in beat.ranks]


@pytest.mark.slow
def test_a_place_with_a_gpu_begins_in_its_standby_and_has_another(
    gang: RayGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bundle, "stands_by", True)  # these nodes have no GPU
    gang.prewarm(2, ONE, "ready_targets:wait")
    until(gang, lambda beat: gang.ready() == 2)
    time.sleep(0.5)
    gang.start(2, ONE, "ready_targets:wait", {})
    beat = until(gang, running)
    for rank in beat.ranks:
        process = psutil.Process(rank.pid)
        fork_server = process.parent()
        assert fork_server is not None
        (standby,) = set(fork_server.children()) - {process}
        assert standby.create_time() > process.create_time()
    assert (len(beat.ranks), gang.ready(), gang.capacity(ONE)) == (2, 2, 2)
    gang.stop()
    assert standby.is_running()


@pytest.mark.slow
def test_a_place_on_its_way_counts_though_nobody_polls(gang: RayGang) -> None:
    gang.start(1, ONE, WAIT, {})
    until(gang, running)
    gang.prewarm(2)
    until(gang, lambda beat: bool(gang._pending))
    gang.stop()
    deadline = time.monotonic() + 30
    while gang.capacity(ONE) < 2:  # as a run that waits for room
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_node_whose_processes_do_not_start_is_named(gang: RayGang, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two: the other's processes have imported everything. Asked for in ray#58878."""
    monkeypatch.setattr("cluster.workers.ray_gang.START_TIMEOUT", 0.0)
    gang.start(1, ONE, WAIT, {})
    there = until(gang, running).ranks[0].node
    (late,) = {node.address for node in nodes.alive()} - {there}
    gang._spec, gang._target_workers = gang._spec._replace(target="never_imported:main"), 2
    gang._request_missing()
    with pytest.raises(
        TimeoutError, match="the processes did not start for 1 of 2 groups of 1 worker with"
    ) as found:
        gang._wait_for_workers(2)
    assert str(found.value).endswith(f" s on {late}")


@pytest.mark.slow
def test_nodes_can_be_avoided(gang: RayGang) -> None:
    gang.start(1, ONE, WAIT, {})
    before = until(gang, running).ranks[0].node
    gang.stop()
    assert gang.capacity(ONE, {before}) == 1
    gang.start(1, ONE, WAIT, {}, avoid={before})
    assert until(gang, running).ranks[0].node != before


def test_a_drained_node_gives_notice_and_takes_nothing_new(gang: RayGang, cluster: Cluster) -> None:
    gang.start(2, ONE, WAIT, {})
    beat = until(gang, running)
    group, _ = gang._slots[1]
    assert nodes.drain(group.locations[0][0], 600, "spot")
    beat = until(gang, lambda beat: beat.ranks[1].leaving)
    assert (beat.ranks[0].leaving, beat.ranks[1].state) == (False, "running")
    assert gang.capacity(ONE) == 1
    gang.stop()
    gang.start(1, ONE, WAIT, {})
    assert until(gang, running).ranks[0].node == beat.ranks[0].node
    cluster.remove_node(next(n for n in cluster.worker_nodes if n.node_ip_address == beat.ranks[1].node))


def fork_servers_of(beat: GangStatus) -> list[int]:
    return [psutil.Process(rank.pid).ppid() for rank in beat.ranks]


def actors_of(gang: RayGang) -> int:
    return len({host for group, _ in gang._slots for host in group.hosts})


@pytest.mark.slow
@pytest.mark.parametrize("together", [2, 1])
def test_the_ranks_of_a_node_share_an_actor_and_each_dies_and_freezes_alone(
    gang: RayGang, together: int
) -> None:
    """Whether they must share a node, as under tensor parallelism, or happen to."""
    gang.start(4, HALF, WAIT, {}, ranks_per_group=together)
    beat = until(gang, running)
    places = [rank.node for rank in beat.ranks]
    assert places[0] == places[1]
    assert places[2] == places[3]
    assert places[0] != places[2]
    assert (gang.ready(), actors_of(gang)) == (4, 2)
    fork_servers = fork_servers_of(beat)
    assert len(set(fork_servers)) == 4
    os.kill(beat.ranks[1].pid, signal.SIGKILL)
    os.kill(beat.ranks[3].pid, signal.SIGSTOP)
    frozen_at = time.monotonic()
    beat = until(gang, lambda beat: beat.ranks[1].error != "" and time.monotonic() > frozen_at + 3)
    assert beat.ranks[1].error == "process ended with exit code -9"
    assert [rank.state for rank in beat.ranks] == ["running", "dead", "running", "running"]
    heard = [rank.last_heartbeat - frozen_at for rank in beat.ranks]
    assert heard[3] < 1 < min(heard[0], heard[2])  # its silence is noticed, and the others are heard of
    gang.stop()
    assert not any(psutil.pid_exists(rank.pid) for rank in beat.ranks)
    gang.start(4, HALF, WAIT, {}, ranks_per_group=together)
    assert fork_servers_of(until(gang, running)) == fork_servers


@pytest.mark.slow
def test_a_gang_shrinks_and_grows_by_single_ranks_of_a_node(gang: RayGang) -> None:
    fork_servers: dict[int, list[int]] = {}
    for ranks, actors in ((4, 2), (3, 2), (4, 3), (2, 1), (1, 1)):
        gang.start(ranks, HALF, WAIT, {})
        gang.prewarm(ranks)
        beat = until(gang, running)
        assert [rank.node for rank in beat.ranks] == sorted(rank.node for rank in beat.ranks)
        assert (gang.ready(), actors_of(gang)) == (ranks, actors)
        fork_servers[ranks] = fork_servers_of(beat)
        deadline = time.monotonic() + 10
        while gang.capacity(HALF) != 4:  # what it gives back is free
            assert time.monotonic() < deadline
            time.sleep(0.05)
        gang.stop()
    assert (
        len({*fork_servers[4]} & {*fork_servers[3]}) == 3
    )  # the group of the other node, and the smaller one


@pytest.mark.slow
def test_ranks_find_room_that_others_have_left_of_a_node(
    gang: RayGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's view of it is late: the gang asks for room for two ranks on each node, and one node has it for one."""
    view = nodes.alive()
    other = ray.remote(num_cpus=0.5)(Other).remote()
    ray.get(other.answer.remote())
    with monkeypatch.context() as late:
        late.setattr(nodes, "alive", lambda: view)
        gang.prewarm(4, HALF, WAIT)
        assert [pending.ranks for pending in gang._pending] == [2, 2]
    until(gang, lambda beat: gang.ready() == 3)
    gang.start(3, HALF, WAIT, {})
    assert (len(until(gang, running).ranks), actors_of(gang)) == (3, 2)
    ray.kill(other)


class Other:
    """An actor of another job."""

    def answer(self) -> None:
        """Answer, once it is there."""


@pytest.mark.slow
def test_a_fork_server_that_dies_takes_the_ranks_of_its_actor_along_and_the_next_attempt_has_another(
    gang: RayGang,
) -> None:
    gang.start(2, HALF, WAIT, {}, ranks_per_group=2)
    beat = until(gang, running)
    fork_servers = fork_servers_of(beat)
    os.kill(fork_servers[1], signal.SIGKILL)
    beat = until(gang, lambda beat: all(rank.error for rank in beat.ranks))
    assert [rank.state for rank in beat.ranks] == ["dead", "dead"]
    assert beat.ranks[1].error == "the process that starts ranks has ended"
    gang.stop()
    assert gang.lost_nodes() == set()
    gang.start(2, HALF, WAIT, {}, ranks_per_group=2)
    again = until(gang, running)
    assert not {*fork_servers_of(again)} & {*fork_servers}


@pytest.mark.slow
@pytest.mark.parametrize("together", [2, 1])
def test_each_rank_of_an_actor_sees_a_gpu_of_its_own(gang: RayGang, cluster: Cluster, together: int) -> None:
    """Ray names the GPUs of an actor without looking for any."""
    node = cluster.add_node(
        num_cpus=1,
        num_gpus=2,
        node_ip_address="127.0.0.99",
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        dashboard_agent_listen_port=0,
    )
    cluster.wait_for_nodes(timeout=60)
    gang.start(2, Bundle(0.5, gpu=1), "targets:gpus", {}, ranks_per_group=together)
    beat = until(gang, lambda beat: all(rank.state == "done" for rank in beat.ranks))
    assert sorted(rank.result for rank in beat.ranks) == ["0", "1"]
    assert {rank.node for rank in beat.ranks} == {"127.0.0.99"}
    assert actors_of(gang) == 1
    cluster.remove_node(node)


@pytest.mark.slow
def test_a_group_that_no_node_can_hold_is_spread_with_an_actor_for_each_rank(gang: RayGang) -> None:
    gang.start(2, ONE, WAIT, {}, ranks_per_group=2)
    beat = until(gang, running)
    assert len({rank.node for rank in beat.ranks}) == 2
    (group,) = gang._groups
    assert len(group.hosts) == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["host", "fork server"])
def test_a_place_that_dies_is_not_its_node(gang: RayGang, killed: str) -> None:
    """Its node would be avoided for a minute, and where there is one node only, the run would wait for it."""
    gang.start(2, ONE, WAIT, {})
    beat = until(gang, running)
    fork_server = psutil.Process(beat.ranks[1].pid).parent()
    assert fork_server is not None
    host = fork_server.parent()
    assert host is not None
    (host if killed == "host" else fork_server).kill()
    beat = until(gang, lambda beat: beat.ranks[1].state == "dead" and beat.ranks[1].error != "")
    assert beat.ranks[1].cause == Cause("lost", name="place" if killed == "host" else "fork server")
    gang.stop()
    assert gang.lost_nodes() == set()
    deadline = time.monotonic() + 10
    while gang.capacity(ONE) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gang.start(2, ONE, WAIT, {})
    assert len({rank.node for rank in until(gang, running).ranks}) == 2


@pytest.mark.slow
def test_a_place_that_stays_frozen_is_given_up_where_its_node_answers(gang: RayGang) -> None:
    gang.start(2, ONE, WAIT, {})
    fork_server = psutil.Process(until(gang, running).ranks[1].pid).parent()
    assert fork_server is not None
    host = fork_server.parent()
    assert host is not None
    host.suspend()
    try:
        gang.stop()
        assert gang.lost_nodes() == set()
        deadline = time.monotonic() + 30
        while gang.capacity(ONE) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        with contextlib.suppress(psutil.Error):
            host.resume()  # only then can it hear that it is given up

"""A service on every node that has processors: reachable, quiet, and gone with the one who started it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.workers import nodes
from cluster.workers.on_ray import RayNodeServices

SNAPSHOT_SERVER = "orchestrator.checkpoint.snapshot_server:SnapshotServer"


@pytest.fixture
def services(cluster: Cluster) -> Iterator[RayNodeServices]:
    ray.init(address=cluster.address, logging_level="warning")
    found = RayNodeServices(SNAPSHOT_SERVER, "secret")
    yield found
    found.stop()
    ray.shutdown()


def test_every_node_with_processors_has_one_until_they_are_stopped(
    services: RayNodeServices, cluster: Cluster
) -> None:
    places = services.ensure_running()
    assert {place["node"] for place in places} == {node.node_ip_address for node in cluster.worker_nodes}
    assert len(places) == 2
    assert services.ensure_running() == places
    assert services.ensure_running(min_nodes=3) == []
    for place in places:
        _connect(place["address"])
    services.stop()
    deadline = time.monotonic() + 10
    while any(_answers(place["address"]) for place in places):
        assert time.monotonic() < deadline, "a service still answers 10 s after it was stopped"
        time.sleep(0.1)


def test_a_service_that_died_on_a_living_node_is_replaced(
    services: RayNodeServices, cluster: Cluster
) -> None:
    places = services.ensure_running()
    ray.kill(next(iter(services._actors.values())))
    deadline = time.monotonic() + 60
    while (again := services.ensure_running()) == places:
        assert time.monotonic() < deadline, "a service that is gone is still named"
        time.sleep(0.1)
    assert {place["node"] for place in again} == {place["node"] for place in places}
    assert len([place for place in again if place not in places]) == 1
    for place in again:
        _connect(place["address"])


def test_a_service_leaves_the_processors_to_the_ranks(services: RayNodeServices, cluster: Cluster) -> None:
    services.ensure_running()
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes]
    workers = [child for pid in raylets for child in psutil.Process(pid).children()]
    actors = [worker for worker in workers if "ray::NodeService" in " ".join(worker.cmdline())]
    assert len(actors) == 2
    time.sleep(0.5)  # it is told to rest after it has said where it is
    before = [_wakes(actor.pid) for actor in actors]
    time.sleep(2)
    assert [_wakes(actor.pid) - n for actor, n in zip(actors, before, strict=True)] == [0, 0]


def test_a_node_that_computes_wrongly_is_left_and_drained_once_it_is_idle(
    services: RayNodeServices, cluster: Cluster
) -> None:
    """Ray ends the node, and neither the head nor the node of the run itself is ever drained."""
    first, second = sorted(place["node"] for place in services.ensure_running())
    assert nodes.drain_idle(first) == (False, "other work runs there")
    services.leave({first})
    assert [place["node"] for place in services.ensure_running()] == [second]
    deadline = time.monotonic() + 60
    while (answer := nodes.drain_idle(first)) != (True, ""):
        assert not answer.is_final
        assert time.monotonic() < deadline, "the node is not idle"
        time.sleep(0.1)
    while first in {node.address for node in nodes.alive()}:
        assert time.monotonic() < deadline, "the drained node is still there"
        time.sleep(0.1)
    (head,) = (n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"] and not n["Resources"].get("CPU"))
    assert nodes.drain_idle(head) == (True, "the head of the cluster runs there")
    assert nodes.drain_idle("10.255.255.1") == (True, ""), "it is gone"
    assert [node.address for node in nodes.alive()] == [second]


def _wakes(pid: int) -> int:
    """How often the main thread has waited and gone on."""
    text = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), 2.0).close()


def _answers(address: str) -> bool:
    try:
        _connect(address)
    except OSError:
        return False
    return True

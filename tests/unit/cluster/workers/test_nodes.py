"""Room for workers, from what Ray says of its nodes."""

from __future__ import annotations

from collections.abc import Set
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.workers import nodes, ray_internals
from cluster.workers.gang import Bundle


def node(name: str, alive: bool = True, cpu: float = 8.0) -> dict[str, Any]:
    address, labels = f"10.0.0.{ord(name[0])}", {"zone": name}
    told = {"NodeID": name, "Alive": alive, "NodeManagerAddress": address}
    return {**told, "Resources": {"CPU": cpu}, "Labels": labels}


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that have room, one that is dead and one that has no processors."""
    told = [node("a"), node("b"), node("dead", alive=False), node("head", cpu=0.0)]
    free = {"a": {"CPU": 3.0, "GPU": 1.0}, "b": {"CPU": 2.5}, "dead": {"CPU": 64.0}, "unknown": {"CPU": 64.0}}
    monkeypatch.setattr(ray, "nodes", lambda: told)
    monkeypatch.setattr(nodes.ray_internals, "free_resources_by_node", lambda: free)
    monkeypatch.setattr(nodes, "draining", frozenset)


@pytest.mark.parametrize(
    ("bundle", "room"), [(Bundle(1), 5), (Bundle(2), 2), (Bundle(0.5), 11), (Bundle(1, 1), 1), (Bundle(9), 0)]
)
def test_room_is_counted_node_by_node(bundle: Bundle, room: int) -> None:
    assert nodes.free_workers(bundle, frozenset()) == room


@pytest.mark.parametrize(("avoid", "room"), [({"a"}, 2), ({"10.0.0.97"}, 2), ({"a", "b"}, 0), ({"c"}, 5)])
def test_nodes_are_avoided_by_id_and_by_address(avoid: Set[str], room: int) -> None:
    assert nodes.free_workers(Bundle(1), avoid) == room


@pytest.mark.parametrize(("wanted", "room"), [("a", 3), ("!a", 2), ("in(b,c)", 2), ("!in(b,c)", 3), ("d", 0)])
def test_labels_say_which_nodes_will_do(wanted: str, room: int) -> None:
    assert nodes.free_workers(Bundle(1, labels={"zone": wanted}), frozenset()) == room


@pytest.mark.parametrize(("wanted", "room"), [("a", 0), ("!a", 5), ("in(a)", 0), ("!in(a)", 5)])
def test_a_node_without_the_label_is_none_of_those_excluded(wanted: str, room: int) -> None:
    assert nodes.free_workers(Bundle(1, labels={"rack": wanted}), frozenset()) == room


def test_draining_nodes_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "draining", lambda: frozenset({"b"}))
    assert nodes.free_workers(Bundle(1), frozenset()) == 3


def test_without_processors_a_node_is_none() -> None:
    assert [n.id for n in nodes.alive()] == ["a", "b"]


def test_the_head_and_the_own_node_are_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[str] = []
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a", gcs_address="")
    )
    monkeypatch.setattr(
        nodes.ray_internals, "drain_idle_node", lambda node, message: not drained.append(node)
    )
    head = node("head", cpu=4.0)
    monkeypatch.setattr(
        ray, "nodes", lambda: [node("a"), node("b"), head | {"Resources": {ray_internals.HEAD: 1.0}}]
    )
    assert nodes.drain_idle("10.0.0.97") == (True, "the controller of the run is there")
    assert nodes.drain_idle("10.0.0.104") == (True, "the head of the cluster runs there")
    assert drained == []
    assert nodes.drain_idle("10.0.0.98") == (True, "")
    assert drained == ["b"]
    monkeypatch.setattr(nodes.ray_internals, "drain_idle_node", lambda node, message: False)
    assert nodes.drain_idle("10.0.0.98") == (False, "other work runs there")

"""What a worker is offered, from what Ray says of its nodes."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer, smallest_offer


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray would tell; to be filled."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "nodes", lambda: found)
    return found


def test_no_node_makes_no_offer(nodes: list[dict[str, Any]]) -> None:
    assert smallest_offer(Bundle(1)) is None
    nodes += [node("a", CPU=2.0, memory=8e9), node("b", alive=False, CPU=8.0, memory=8e9)]
    assert smallest_offer(Bundle(4)) is None


def test_workers_share_the_memory_of_their_node(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("a", CPU=4.0, memory=8e9), node("b", CPU=2.0, memory=6e9)]
    assert smallest_offer(Bundle(1)) == Offer(2e9)
    assert smallest_offer(Bundle(2)) == Offer(4e9)
    assert smallest_offer(Bundle(4)) == Offer(8e9)


def test_half_a_processor_is_counted_exactly(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node("a", CPU=1.0, memory=9e9))
    assert smallest_offer(Bundle(0.1)) == Offer(9e8)


def test_the_scarcer_resource_counts(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node("a", CPU=64.0, GPU=2.0, memory=8e9, **{"accelerator_type:H100": 1.0}))
    assert smallest_offer(Bundle(1, 1)) == Offer(4e9, "H100")


def test_a_worker_without_a_gpu_has_no_accelerator(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node("a", CPU=1.0, GPU=1.0, memory=8e9, **{"accelerator_type:H100": 1.0}))
    assert smallest_offer(Bundle(1)) == Offer(8e9, "")


def test_a_node_without_processors_is_passed_over(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("head", memory=1e9), node("a", CPU=1.0, memory=8e9)]
    assert smallest_offer(Bundle(1)) == Offer(8e9)

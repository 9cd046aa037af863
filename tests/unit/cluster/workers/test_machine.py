"""What a worker is offered, from what Ray says of its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.workers import machine
from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer, host_memory, smallest_offer


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray would tell; to be filled. Drivers say nothing."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(machine, "_by_driver", lambda asked: {})
    monkeypatch.setattr(ray, "nodes", lambda: found)
    return found


def test_no_node_makes_no_offer(nodes: list[dict[str, Any]]) -> None:
    assert smallest_offer(Bundle(1), 64) is None
    nodes += [node("a", CPU=2.0, memory=8e9), node("b", alive=False, CPU=8.0, memory=8e9)]
    assert smallest_offer(Bundle(4), 64) is None


def test_workers_share_the_memory_of_their_node(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("a", CPU=4.0, memory=8e9), node("b", CPU=2.0, memory=6e9)]
    assert smallest_offer(Bundle(1), 64) == Offer(2e9)
    assert smallest_offer(Bundle(2), 64) == Offer(4e9)
    assert smallest_offer(Bundle(4), 64) == Offer(8e9)


def test_only_the_workers_that_a_run_has_share_it(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("a", CPU=64.0, memory=64e9), node("b", CPU=4.0, memory=8e9)]
    assert smallest_offer(Bundle(1), 2) == Offer(4e9)
    assert smallest_offer(Bundle(1), 64) == Offer(1e9)


def test_the_driver_tells_which_of_two_gpus_it_is(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's name of both is A100."""
    large, small = (f"NVIDIA A100-SXM4-{size}GB" for size in (80, 40))
    for name in "abc":
        nodes.append(node(name, CPU=8.0, GPU=2.0, memory=8e9, **{"accelerator_type:A100": 1.0}))
    said = {"a": (large, 85e9), "b": (large, 84e9)}
    monkeypatch.setattr(
        machine, "_by_driver", lambda asked: {name: said[name] for name in asked if name in said}
    )
    assert smallest_offer(Bundle(1, 1), 64) == Offer(4e9, large, 84e9)
    said["c"] = small, 42e9
    assert smallest_offer(Bundle(1, 1), 64) == Offer(4e9, small, 42e9)


def test_no_more_memory_than_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CONTAINER_LIMITS", (limit,))
    whole = host_memory()
    for text, expected in (("max", whole), ("1000000", 1e6), (str(2**62), whole)):
        limit.write_text(text + "\n")
        assert host_memory() == expected


def test_half_a_processor_is_counted_exactly(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node("a", CPU=1.0, memory=9e9))
    assert smallest_offer(Bundle(0.1), 64) == Offer(9e8)


def test_the_scarcer_resource_counts(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node("a", CPU=64.0, GPU=2.0, memory=8e9, **{"accelerator_type:H100": 1.0}))
    assert smallest_offer(Bundle(1, 1), 64) == Offer(4e9, "H100")


def test_a_worker_without_a_gpu_has_no_accelerator(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node("a", CPU=1.0, GPU=1.0, memory=8e9, **{"accelerator_type:H100": 1.0}))
    assert smallest_offer(Bundle(1), 64) == Offer(8e9, "")


def test_a_node_without_processors_is_passed_over(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("head", memory=1e9), node("a", CPU=1.0, memory=8e9)]
    assert smallest_offer(Bundle(1), 64) == Offer(8e9)

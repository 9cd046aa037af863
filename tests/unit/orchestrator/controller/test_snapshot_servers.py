"""When snapshots are kept in the memory of nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_gang import FakeGang
from scripted import fake_cluster

from orchestrator.checkpoint.snapshot_server import LIMIT
from orchestrator.config.spec import parse
from orchestrator.controller.snapshot_servers import SnapshotServers
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.host_memory import SERVER_COPIES

SHAPE = ModelShape(
    parameters=100_000, layers=2, hidden=32, heads=4, kv_heads=4, feedforward=64, vocabulary=512,
    sequence_length=32, flops_per_token=6e5,
)  # fmt: skip


class Nodes:
    """Services on so many nodes."""

    def __init__(self, count: int) -> None:
        self.count, self.stopped = count, False

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        return (
            [{"node": f"n{n}", "address": f"n{n}:1"} for n in range(self.count)]
            if self.count >= min_nodes
            else []
        )

    def stop(self) -> None:
        self.stopped = True


def holders(every: Any, nodes: Nodes, average: dict[str, float] | None = None) -> SnapshotServers:
    spec = parse(
        {
            "name": "a",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 8},
            "train": {"steps": 1, "global_batch": 1},
            "checkpoint": {"snapshot_every": every, "average": average},
        }
    )
    cluster = fake_cluster(lambda: FakeGang(lambda attempt: iter(())))
    there = dataclasses.replace(cluster, services=lambda target, token: nodes)
    return SnapshotServers(spec.checkpoint, spec.train.optimizer, there)


@pytest.mark.parametrize(
    ("every", "nodes", "count"), [("auto", 1, 0), ("auto", 2, 2), (1, 1, 1), (5, 3, 3), (None, 3, 0)]
)
def test_they_are_where_they_help(every: Any, nodes: int, count: int) -> None:
    assert len(holders(every, Nodes(nodes)).ensure_running(SHAPE)) == count


def test_they_stay_when_a_lost_node_leaves_one() -> None:
    """The step that the run restores may be in the memory of that node alone."""
    nodes = Nodes(2)
    found = holders("auto", nodes)
    assert [server["node"] for server in found.ensure_running(SHAPE)] == ["n0", "n1"]
    assert [server["node"] for server in found.ensure_running(SHAPE, lost={"n1"})] == ["n0"]
    nodes.count = 1
    assert [server["node"] for server in found.ensure_running(SHAPE)] == ["n0"]


def test_left_open_they_must_have_the_memory() -> None:
    state = 12  # bytes of a parameter: its weight and the two moments of Adam
    fits = dataclasses.replace(SHAPE, parameters=int(2 * LIMIT / (SERVER_COPIES * state)))
    large = dataclasses.replace(SHAPE, parameters=fits.parameters + 1_000)
    assert len(holders("auto", Nodes(2)).ensure_running(fits)) == 2
    assert holders("auto", Nodes(2)).ensure_running(large) == []
    assert holders("auto", Nodes(2), {"ema": 0.9}).ensure_running(fits) == []
    adapted = dataclasses.replace(large, trained_share=0.01)
    assert len(holders("auto", Nodes(2)).ensure_running(adapted)) == 2
    assert len(holders(1, Nodes(2)).ensure_running(large)) == 2  # who asks for them knows better


def test_they_end_with_the_run() -> None:
    nodes = Nodes(2)
    holders("auto", nodes).stop()
    assert nodes.stopped

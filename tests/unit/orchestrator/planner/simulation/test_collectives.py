"""Collectives by latency and bandwidth, over nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.planner.device import Link, Machine
from orchestrator.planner.simulation.collectives import Group

BEGINS = 2e-5
FAST = Machine(
    1e9,
    1e12,
    per_node=8,
    inside=Link(1e-6, 2e11),
    between=Link(1e-5, 2e10),
    launches_ahead=True,
    collective=BEGINS,
)


def test_a_ring_in_a_node_moves_what_the_algorithm_says() -> None:
    assert Group(8, 1, FAST).all_reduce(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 2e11, rel=0.01)
    assert Group(8, 1, FAST).gather(1e9) == pytest.approx(7 / 8 * 1e9 / 2e11, rel=0.01)


def test_any_message_has_a_beginning() -> None:
    group, bare = Group(8, 1, FAST), replace(FAST, collective=0.0, launches_ahead=False)
    sent = (
        group.all_reduce(1.0),
        group.gather(1.0),
        group.scatter(1.0),
        group.all_to_all(1.0),
        group.to_next(1.0),
    )
    assert all(BEGINS < seconds < 2 * BEGINS for seconds in sent)
    assert Group(8, 1, bare).all_reduce(1.0) == pytest.approx(2 * 3 * 1e-6, rel=0.01)


def test_ranks_of_a_node_share_its_rails() -> None:
    whole, strided = Group(16, 1, FAST), Group(16, 8, FAST)
    assert (whole.in_node, whole.nodes) == (8, 2)
    assert (strided.in_node, strided.nodes) == (1, 16)
    assert strided.scatter(1e9) > 5 * whole.scatter(1e9)


def test_small_messages_over_many_nodes_go_by_tree() -> None:
    group = Group(1024, 8, FAST)
    assert group.all_reduce(1e3) < 2 * 1023 * 1e-5 / 10
    assert group.all_reduce(1e3) > 2 * 10 * 1e-5


def test_gloo_sums_whole_tensors_to_scatter_them() -> None:
    group = Group(2, 1, replace(FAST, launches_ahead=False))
    assert group.all_reduce(1e6) == group.scatter(1e6) > group.gather(1e6)
    assert group.gather(1e6) == Group(2, 1, FAST).gather(1e6) == Group(2, 1, FAST).scatter(1e6)


def test_one_rank_sends_nothing() -> None:
    alone = Group(1, 1, FAST)
    assert alone.all_reduce(1e9) == alone.gather(1e9) == alone.all_to_all(1e9) == alone.to_next(1e9) == 0


def test_an_exchange_across_nodes_is_bound_by_the_rails() -> None:
    assert Group(8, 1, FAST).all_to_all(1e9) == pytest.approx(7 / 8 * 1e9 / 2e11, rel=0.01)
    assert Group(16, 1, FAST).all_to_all(1e9) == pytest.approx(0.5 * 1e9 / 2e10, rel=0.01)


def test_groups_that_do_not_divide_a_node_lie_across_two() -> None:
    three, pairs = Group(3, 1, FAST), Group(2, 3, FAST)
    assert three.all_reduce(1e9) > 4 * Group(4, 1, FAST).all_reduce(1e9)
    assert pairs.to_next(1e9) == Group(2, 8, FAST).to_next(1e9)
    alone = FAST.among(6)  # all of whose ranks are on one node
    assert Group(3, 1, alone).all_reduce(1e9) < Group(4, 1, FAST).all_reduce(1e9)
    assert Group(2, 3, alone).to_next(1e9) == Group(2, 1, FAST).to_next(1e9)

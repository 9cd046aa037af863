"""Nodes that compute wrongly: remembered while the run lasts, and never given ranks again meanwhile."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from fake_gang import FakeGang

from cluster.workers.gang import Bundle, Cause
from orchestrator.controller.capacity import Capacity
from orchestrator.controller.events import EventHistory
from orchestrator.controller.health import EXCLUSION, STRIKES, Failure


def event(phase: str, **more: Any) -> dict[str, Any]:
    return {"time": 1.0, "attempt": 1, "phase": phase, "step": 8, "reason": "", "first_fault": None, **more}


FAULT = {
    "wrong_nodes": ["10.0.0.1"],
    "cause": {"end": "raised", "kind": "wrong_arithmetic", "step": 4, "ranks": [1]},
    "first_fault": "rank 1 on 10.0.0.1: step 8",
}


def test_a_controller_that_restarts_knows_what_is_in_doubt() -> None:
    history = EventHistory([event("start"), event("stop", **FAULT)])
    assert history.wrong_nodes == {"10.0.0.1"}
    assert history.doubtful_after == 4
    history.add(event("start"))
    assert history.wrong_nodes == {"10.0.0.1"}
    assert history.doubtful_after is None
    history.add(event("failed"))
    assert history.wrong_nodes == frozenset()


def test_a_cause_is_the_same_after_a_round_trip() -> None:
    failure = Failure.on_record(event("stop", **FAULT), ago=1.0, now=2.0)
    assert failure.cause == Cause("raised", kind="wrong_arithmetic", step=4, ranks=(1,))
    assert failure.wrong_nodes == ("10.0.0.1",)


class Nodes(FakeGang):
    """Two workers on each of three nodes."""

    def __init__(self) -> None:
        super().__init__(lambda _: iter(()))

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        return 2 * len({"a", "b", "c"} - avoid)


def test_a_wrong_node_is_avoided_even_without_enough_others() -> None:
    """A node with three dead ranks is used again rather than wait; one that computes wrongly is not."""
    strikes = [Failure(10.0, 1, "", "", node="a")] * STRIKES
    capacity = Capacity(Nodes(), Bundle(), min_workers=4)
    wrong = frozenset({"b"})

    def count(now: float, **more: Any) -> int:
        return capacity.count("wait", strikes, now, lambda avoid: 0, **more)

    assert count(10.0) == 4
    assert capacity.avoid == {"a"}
    assert count(10.0, wrong=wrong) == 4
    assert capacity.avoid == wrong, "with the other left out too there would be room for two"
    assert count(10.0 + EXCLUSION, wrong=wrong) == 4
    capacity = Capacity(Nodes(), Bundle(), min_workers=6)
    assert count(10.0, wrong=wrong) == 4
    assert capacity.avoid == wrong

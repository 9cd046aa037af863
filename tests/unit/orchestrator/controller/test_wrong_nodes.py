"""The controller drains a node that computes wrongly when it is idle, and reports a refusal once."""

from __future__ import annotations

import dataclasses

import pytest
from fake_gang import FakeGang
from scripted import fake_cluster

from cluster.workers.gang import DrainAnswer
from orchestrator.controller import wrong_nodes
from orchestrator.controller.wrong_nodes import PATIENCE, PAUSE, WrongNodes

BUSY = DrainAnswer(is_final=False, refusal="other work runs there")


class Clock:
    """A clock that a test sets, and a cluster that answers in turn; the last answer stays."""

    def __init__(self, *answers: DrainAnswer) -> None:
        self.now, self.answers, self.asked = 1000.0, list(answers), 0

    def monotonic(self) -> float:
        return self.now

    def drain(self, address: str) -> DrainAnswer:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def draining(monkeypatch: pytest.MonkeyPatch, *answers: DrainAnswer) -> tuple[Clock, WrongNodes]:
    clock = Clock(*answers)
    monkeypatch.setattr(wrong_nodes, "time", clock)
    cluster = fake_cluster(lambda: FakeGang(lambda attempt: iter(())))
    return clock, WrongNodes(dataclasses.replace(cluster, drain=clock.drain))


def test_a_node_is_drained_as_soon_as_nothing_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, nodes = draining(monkeypatch, BUSY, BUSY, DrainAnswer(is_final=True))
    assert nodes.drain({"a"}) == []
    assert nodes.drain({"a"}) == []
    assert clock.asked == 1, "Ray is not asked in every pass of the loop"
    for _ in range(2):
        clock.now += 2 * PAUSE
        lines = nodes.drain({"a"})
    assert lines == [
        "a, which computes wrongly, is drained: Ray starts nothing more there, and ends the node"
    ]
    clock.now += 2 * PAUSE
    assert nodes.drain({"a"}) == []
    assert clock.asked == 3


def test_a_node_with_other_work_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, nodes = draining(monkeypatch, BUSY)
    assert nodes.drain({"a"}) == []
    clock.now += PATIENCE + 1
    (line,) = nodes.drain({"a"})
    assert line.startswith(
        "a, which computes wrongly, is not drained, because other work runs there; take it out"
    )
    asked = clock.asked
    clock.now += PATIENCE + 1
    assert nodes.drain({"a"}) == []
    assert clock.asked == asked


def test_the_node_of_the_head_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head = DrainAnswer(is_final=True, refusal="the head of the cluster runs there")
    _, nodes = draining(monkeypatch, head)
    (line,) = nodes.drain({"a"})
    assert "is not drained, because the head of the cluster runs there" in line

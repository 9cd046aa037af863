"""Which nodes evaluate commits, on a cluster without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_gang import Attempt, FakeGang

from cluster.workers.gang import Bundle, GangStatus, RankStatus
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.controller.background_evaluation import BackgroundEvaluation
from orchestrator.controller.state import State
from orchestrator.data.prepared import PreparedData
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.parallel.layout import Layout
from orchestrator.storage.run_directory import RunDir


class Evaluator(FakeGang):
    """A gang of one rank that evaluates without end, which notes the nodes that it was told to avoid."""

    def __init__(self) -> None:
        super().__init__(self._beats)
        self.avoided: list[Set[str]] = []

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        self.avoided.append(avoid)

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        return super().poll(saved, wait) if self._attempt is not None else GangStatus()

    def start(self, *arguments: Any, **more: Any) -> None:
        self.avoided.append(more["avoid"])
        super().start(*arguments, **more)

    def _beats(self, attempt: Attempt) -> Iterator[GangStatus]:
        while True:
            yield GangStatus((RankStatus(0, "a", 7),))

    @property
    def is_running(self) -> bool:
        return self._attempt is not None


def test_it_leaves_nodes_that_compute_wrongly(tmp_path: Path) -> None:
    gangs: list[Evaluator] = []

    def gang() -> Evaluator:
        gangs.append(Evaluator())
        return gangs[-1]

    cluster: Any = SimpleNamespace(gang=gang)
    evaluate = EvaluateSpec(every=2, where="beside")
    run = RunDir(str(tmp_path))
    found = BackgroundEvaluation(cluster, run, {}, Bundle(), evaluate, 8, CheckpointSpec(), None)
    state = State(phase="train", attempt=1, layout=Layout(), evaluating=2)
    found.published(2, state)
    for wrong in ((), (), ("a",), ("a",), ("a", "b")):
        found.follow(dataclasses.replace(state, wrong_nodes=frozenset(wrong)), PreparedData(), "")
    assert [each.avoided for each in gangs] == [
        [set(), set()],
        [{"a"}, {"a"}],
        [{"a", "b"}, {"a", "b"}],
    ]
    assert [each.is_running for each in gangs] == [False, False, True]

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.data.prepare import part_tasks
from orchestrator.data.prepare.part_tasks import results


class FakeRay:
    """One node, on which tasks end in any order."""

    def __init__(self) -> None:
        self.draw, self.done, self.cancelled = random.Random(3), dict[int, Any](), list[int]()
        self.running = self.most = self.begun = 0

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": False}]

    def is_initialized(self) -> bool:
        return True

    def put(self, value: Any) -> Any:
        return value

    def options(self, **_: Any) -> FakeRay:
        return self

    def remote(self, run: Callable[[Any], Any], given: Any) -> int:
        self.done[self.begun] = run(given)
        self.begun, self.running = self.begun + 1, self.running + 1
        self.most = max(self.most, self.running)
        return self.begun - 1

    def wait(self, running: list[int]) -> tuple[list[int], list[int]]:
        ended = self.draw.choice(running)
        self.running -= 1
        return [ended], [one for one in running if one != ended]

    def get(self, number: int) -> Any:
        return self.done[number]

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(part_tasks, "ray", made)
    monkeypatch.setattr(part_tasks, "_call", made)
    return made


@pytest.mark.parametrize("workers", [1, 3, 60])
def test_results_come_in_order_of_as_many_at_once_as_there_are_workers(fake: FakeRay, workers: int) -> None:
    given = [{"n": number} for number in range(40)]
    found = list(results(lambda row: {"n": row["n"] ** 2}, given, workers, 1.0, 8))
    assert [row["n"] for row in found] == [number**2 for number in range(40)]
    assert (fake.begun, fake.most, fake.cancelled) == (40, min(workers, 40), [])


def test_who_takes_no_more_results_leaves_no_task_running(fake: FakeRay) -> None:
    found = results(lambda row: row, [{"n": number} for number in range(40)], 4, 1.0, 8)
    assert next(found) == {"n": 0}
    found.close()  # type: ignore[attr-defined]
    assert len(fake.cancelled) == fake.running
    assert fake.begun < 40

"""How long a run waits for its turn, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.jobs.admission import Admission
from orchestrator.launch import controller_actor as actor
from orchestrator.launch.controller_actor import ControllerActor, NoCapacity


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waiting(verdicts: list[Admission]) -> Any:
    """A controller's actor in line, that hears one verdict after another, and the last one ever after."""
    told = iter(verdicts)

    class QueueClient:
        last = verdicts[-1]

        @property
        def verdict(self) -> Admission:
            return next(told, self.last)

    found: Any = ControllerActor.__new__(ControllerActor)
    found._turn, found._stop, found._summary, found._error = QueueClient(), "", None, None
    found._spec = SimpleNamespace(limits=SimpleNamespace(wait=60.0))
    found._run = SimpleNamespace(write_json=lambda name, value: None)
    found._controller = SimpleNamespace(status=dict)
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(actor, "time", found)
    return found


def test_a_run_that_no_machine_is_there_for_waits_as_long_as_its_limit_says() -> None:
    never = Admission(
        False, waits_for="3 workers of 1 CPU; all nodes together have room for 2", possible=False
    )
    with pytest.raises(NoCapacity, match=r"waited 6. s for 3 workers of 1 CPU; all nodes"):
        waiting([never])._await_turn()


def test_a_turn_may_be_waited_for_as_long_as_it_takes(clock: Clock) -> None:
    patient = waiting([*[Admission(False, waits_for="a comes first")] * 2000, Admission(True, 2)])
    patient._await_turn()
    assert clock.now > 1000

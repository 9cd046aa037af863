"""The clock of a step gives every moment to one part."""

from __future__ import annotations

import time

import pytest
import torch

from orchestrator.parallel import step_clock
from orchestrator.parallel.step_clock import BACKWARD, COMMUNICATION, FORWARD, StepClock, Stopwatch


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    at = [100.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: at[0])
    return at


def test_every_moment_is_in_one_part_and_collectives_are_taken_out(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    now[0] += 7.0  # before the step
    clock.switch(FORWARD)
    now[0] += 1.0
    with clock.communicating():
        now[0] += 0.25
        with clock.communicating():
            now[0] += 0.25
    now[0] += 1.0
    assert clock.switch(BACKWARD) == FORWARD
    now[0] += 4.0
    assert clock.runs
    assert clock.take() == {FORWARD: 2.0, COMMUNICATION: 0.5, BACKWARD: 4.0}
    assert not clock.runs


def test_what_is_not_part_of_a_step_is_not_timed(now: list[float]) -> None:
    """As the collectives of an evaluation, between two steps."""
    clock = StepClock(torch.device("cpu"))
    with clock.communicating():
        now[0] += 1.0
    assert clock.take() == {}


def test_a_part_goes_on_after_an_error_in_a_collective(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.switch(FORWARD)
    with pytest.raises(OSError, match="peer"), clock.communicating():
        raise OSError("peer")
    now[0] += 1.0
    assert clock.take() == {FORWARD: 1.0, COMMUNICATION: 0.0}


class Event:
    """An event of a device that is slower than the host: it is past what `done` says."""

    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_on_cuda_what_is_not_done_is_told_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    told = []
    for _ in range(2):
        clock.switch(FORWARD)
        now[0] += 1.0
        with clock.communicating():  # queued: it is no part of its own
            now[0] += 1.0
        clock.switch("optimizer")
        Event.done = now[0]
        now[0] += 0.5
        told.append(clock.take())
    Event.done = now[0]
    told.append(clock.take())
    assert told == [{FORWARD: 2.0}, {"optimizer": 0.5, FORWARD: 2.0}, {"optimizer": 0.5}]


def test_what_a_device_does_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    """And not by how long it takes to ask for it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    now[0] += 2.0
    watch.stop()
    now[0] += 5.0
    monkeypatch.setattr(Event, "elapsed_time", lambda *_, **__: 7000.0)
    assert watch.seconds() == 7.0

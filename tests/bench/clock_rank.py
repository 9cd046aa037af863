"""The rank program with its step clock on and off in turns, each for BLOCK steps."""

from __future__ import annotations

import time
from typing import Any

import torch

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.step_clock import StepClock
from orchestrator.train import loop
from orchestrator.train.rank import Rank

BLOCK = 5


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Of rank 0: "steps", [[1 with the clock or 0 without, CPU seconds of the step], ...], and "counted", the seconds
    of a step that are spent in the clock: how often it is asked, times what that takes."""
    step, switch, take = Rank._step, StepClock.switch, StepClock.take
    calls, steps = [0], list[list[float]]()

    def counted(self: StepClock, part: str) -> str:
        calls[0] += 1
        return switch(self, part)

    def alternating(rank: Any, *more: Any, **keywords: Any) -> bool:
        on = rank._progress.step // BLOCK % 2 == 1
        counts = rank._progress.step < 2 * BLOCK  # whose times are left out
        StepClock.switch = counted if counts and on else switch if on else (lambda self, part: "")  # type: ignore[method-assign,assignment]
        StepClock.take = take if on else (lambda self: {})  # type: ignore[method-assign,assignment]
        began = time.thread_time()  # other processes of the machine are not in it
        stop = bool(step(rank, *more, **keywords))
        steps.append([float(on), time.thread_time() - began])
        return stop

    Rank._step = alternating  # type: ignore[method-assign]
    loop.main(config, context)
    return {"steps": steps[2 * BLOCK :], "counted": calls[0] / BLOCK * _seconds_of_a_switch()}


def _seconds_of_a_switch() -> float:
    """One of the two that a collective takes, which is the dearer way to ask."""
    clock, times = StepClock(torch.device("cpu")), 20_000
    clock.switch("forward")
    began = time.perf_counter()
    for _ in range(times):
        with clock.communicating():
            pass
    return (time.perf_counter() - began) / times / 2

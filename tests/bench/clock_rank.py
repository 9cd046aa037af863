"""The rank program with its step clock on and off in turns, each for BLOCK steps."""

from __future__ import annotations

from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.train import loop
from orchestrator.train.step_clock import StepClock

BLOCK = 5


def main(config: dict[str, Any], context: WorkerContext) -> list[list[float]]:
    """[[1 with the clock or 0 without, seconds of the step], ...] of rank 0."""
    step, switch, take = loop.Rank._step, StepClock.switch, StepClock.take

    def alternating(rank: Any, *more: Any) -> bool:
        on = rank._progress.step // BLOCK % 2 == 1
        StepClock.switch = switch if on else (lambda self, part: "")  # type: ignore[method-assign,assignment]
        StepClock.take = take if on else (lambda self: {})  # type: ignore[method-assign,assignment]
        return bool(step(rank, *more))

    loop.Rank._step = alternating  # type: ignore[method-assign]
    loop.main(config, context)
    rows = context.unsaved_rows()
    return [[float("forward_seconds" in row), row["step_seconds"]] for row in rows[2 * BLOCK :]]

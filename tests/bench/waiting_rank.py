"""The ranks of `bench_actors.py` and `bench_heartbeats.py`: the imports of a real rank, and no work."""

from __future__ import annotations

import time
from typing import Any

import orchestrator.train.loop  # noqa: F401
from cluster.workers.worker_context import WorkerContext


def wait(config: dict[str, Any], context: WorkerContext) -> None:
    """Wait until the gang ends it."""
    while not context.stop_requested():
        time.sleep(0.2)


def beat(config: dict[str, Any], context: WorkerContext) -> None:
    """Report a step, and leave the processor to the heartbeats."""
    context.report(0)
    time.sleep(3600)

"""Whether streamed text is tokenised as fast as training reads it. Torch-free and ray-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config.resources import PerWorker
from orchestrator.data.config import DataSpec
from orchestrator.planner.choose_layout import Plan

RATES = {"fastest": 8.6e6, "tokenizers": 1.5e6}
"""Bytes of text that one CPU reads, encodes and writes per second, by `data.encode_with`. Measured on two cores
of a Xeon with 40 MB of source code (docs/guides/data.md). Cleaning is not included.
"""
TOKEN_BYTES = 4.0
"""Bytes of text in a token: English with a vocabulary of 32 to 128 thousand entries."""


@dataclass(frozen=True)
class Feed:
    """Rates of tokenisation and training.

    Attributes:
        processors: CPUs beside the workers.
        prepared: tokens per second that they make of text.
        read: tokens per second that training reads if it never waits.
        stall_seconds: how long a step waits while text remains to be tokenised.
    """

    processors: int
    prepared: float
    read: float
    stall_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the feed as plain data."""
        return asdict(self)


def feed(data: DataSpec, worker: PerWorker, plan: Plan) -> Feed | None:
    """Return how the chosen layout is fed; None if the job does not stream text.

    The CPUs are those of the hosts that no worker uses, but at least one: one task runs beside the workers even
    if none is free.

    Args:
        data: the key `data` of the job.
        worker: the resources of a worker.
        plan: the plan of its training.
    """
    if not data.streaming or data.samples is not None:
        return None
    workers, seconds = plan.chosen.layout.world, plan.chosen.seconds
    free_cpus = (plan.machine.host_cores - worker.bundle.cpu) * workers
    processors = max(int(free_cpus), 1)
    # tokens/s = processors x bytes/s per processor / bytes per token
    prepared = processors * RATES[data.encode_with] / TOKEN_BYTES
    return Feed(processors, prepared, plan.tokens / seconds, max(plan.tokens / prepared - seconds, 0.0))

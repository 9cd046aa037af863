"""Whether streamed text becomes tokens as fast as training reads them. Torch-free and ray-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config.spec import JobSpec
from orchestrator.planner.choose_layout import Plan

RATES = {"fastest": 8.6e6, "tokenizers": 1.5e6}
"""Bytes of text that one processor reads, encodes and writes in a second, by `data.encode_with`: measured on two cores
of a Xeon with 40 MB of source code, and taken from docs/guides/data.md. Cleaning comes on top."""
TOKEN_BYTES = 4.0
"""Of text in a token: English by a vocabulary of 32 to 128 thousand."""


@dataclass(frozen=True)
class Feed:
    """Tokens a second that `processors` beside the workers make of text, and that training reads while it waits for
    none; seconds that a step waits as long as text is left that is no token yet."""

    processors: int
    prepared: float
    read: float
    stall_seconds: float

    def to_json(self) -> dict[str, Any]:
        """The feed as plain data."""
        return asdict(self)


def feed(spec: JobSpec, plan: Plan) -> Feed | None:
    """How the chosen layout is fed; None if the job does not stream text. Of processors there are those of the hosts
    that no worker takes, and one at least, since one task runs beside the workers wherever none is free."""
    if not spec.data.streaming or spec.data.samples is not None:
        return None
    workers, seconds = plan.chosen.layout.world, plan.chosen.seconds
    beside = (plan.machine.host_cores - spec.resources.per_worker.bundle.cpu) * workers
    processors = max(int(beside), 1)
    prepared = processors * RATES[spec.data.encode_with] / TOKEN_BYTES
    return Feed(processors, prepared, plan.tokens / seconds, max(plan.tokens / prepared - seconds, 0.0))

"""What a run is doing as metrics of Ray, which every Ray node exports to Prometheus.

Ray puts `ray_` before each name. All have the tag `run`, the name in the job file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Gauge

EVERY = 5.0
"""Seconds between updates; Ray reports about as often."""
GAUGES = {
    "orchestrator_step": "optimiser steps done",
    "orchestrator_steps": "optimiser steps that the job has",
    "orchestrator_attempt": "number of the attempt",
    "orchestrator_loss": "loss of the last step, of a token, record, pair or sample: by the objective",
    "orchestrator_tokens_per_second": "tokens a second of the last step",
    "orchestrator_mfu": "model FLOPs utilisation of the last step, 0 to 1",
    "orchestrator_eta_seconds": "seconds left while it trains",
    "orchestrator_ranks": "ranks that run",
}
"""Names and what they are."""
PARTS = "orchestrator_step_part_seconds"
"""Mean seconds of a late step that went to the part in the tag `part`."""


class RunMetrics:
    """The gauges of one run."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(name, text, ("run",)) for name, text in GAUGES.items()}
        self._parts = Gauge(PARTS, "mean seconds of a late step, by part", ("run", "part"))

    def update(self, status: Mapping[str, Any]) -> None:
        """Set them from a status, see `orchestrator.controller.status`; what is not known keeps its last value."""
        ranks = sum(rank.get("state") == "running" for rank in status.get("ranks") or ())
        for name, gauge in self._gauges.items():
            value = ranks if name == "orchestrator_ranks" else status.get(name.removeprefix("orchestrator_"))
            if isinstance(value, int | float):
                gauge.set(float(value), self._tags)
        for part, seconds in (status.get("step_parts") or {}).items():
            self._parts.set(float(seconds), {**self._tags, "part": part})


def export(run: str, status: Callable[[], Mapping[str, Any]]) -> None:
    """Update the metrics of a run from a thread of its own, as long as this process lives."""

    def work() -> None:
        metrics, pause = RunMetrics(run), threading.Event()
        while True:
            with contextlib.suppress(Exception):  # telemetry may not end a run
                metrics.update(status())
            pause.wait(EVERY)

    threading.Thread(target=work, name="run-metrics", daemon=True).start()

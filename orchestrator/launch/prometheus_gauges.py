"""The gauges of a run that Prometheus reads, exported by the Ray node on which the controller runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Gauge

EVERY = 5.0
"""Seconds between two updates of the metrics, about as often as Ray reports them."""
GAUGES = {
    "orchestrator_step": "optimiser steps done",
    "orchestrator_steps": "optimiser steps that the job has",
    "orchestrator_attempt": "number of the attempt",
    "orchestrator_loss": "loss of the last step, of a token, record, pair or sample: by the objective",
    "orchestrator_tokens_per_second": "tokens per second of the last step",
    "orchestrator_mfu": "model FLOPs utilisation of the last step, 0 to 1",
    "orchestrator_eta_seconds": "seconds left while it trains",
    "orchestrator_ranks": "ranks that run",
    "orchestrator_failed": "1 once the run has failed, else 0",
}
"""The gauges of a run, with their descriptions."""
PARTS = "orchestrator_step_part_seconds"
"""The gauge of the mean seconds that recent steps spent in the part named by the tag `part`."""


class RunMetrics:
    """The Ray gauges of one run."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(name, text, ("run",)) for name, text in GAUGES.items()}
        self._parts = Gauge(PARTS, "mean seconds of a recent step, by part", ("run", "part"))

    def update(self, status: Mapping[str, Any]) -> None:
        """Set the gauges from a status, see `ControllerActor.status`. Without a value in it, a gauge keeps its last."""
        counted = {
            "ranks": sum(rank.get("state") == "running" for rank in status.get("ranks") or ()),
            "failed": int(status.get("phase") == "failed" or bool(status.get("error"))),
        }
        values = {**status, **counted}
        for name, gauge in self._gauges.items():
            value = values.get(name.removeprefix("orchestrator_"))
            if isinstance(value, int | float):
                gauge.set(float(value), self._tags)
        for part, seconds in (status.get("step_parts") or {}).items():
            self._parts.set(float(seconds), {**self._tags, "part": part})


def export(run: str, status: Callable[[], Mapping[str, Any]]) -> None:
    """Update the metrics of a run in a background thread, for as long as this process lives."""

    def work() -> None:
        metrics = RunMetrics(run)
        pause = threading.Event()
        while True:
            with contextlib.suppress(Exception):  # telemetry must not end a run
                metrics.update(status())
            pause.wait(EVERY)

    threading.Thread(target=work, name="run-metrics", daemon=True).start()

"""The rank program of `bench_determinism`: two engines, one with bitwise determinism, that take steps in turns."""

from __future__ import annotations

import time
from typing import Any

from rank_cases import job, micro_batches, workload_of

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.make import make_engine


def main(config: dict[str, Any], context: WorkerContext) -> list[list[float]]:
    """Return the seconds of each turn's steps: one of each engine, which alternate in going first."""
    layout = Layout(**config["layout"])
    specs = [job({**config, "train": train}) for train in config["trains"]]
    device = open_device(specs[0].train, specs[0].resources.per_worker, context)
    engines: list[Any] = []
    for spec in specs:
        engines.append(make_engine(spec.engine, workload_of(spec), layout, device))
        engines[-1].initialise(spec.seed)
    batches = micro_batches(workload_of(specs[0]), specs[0], layout, 1)
    turns = []
    for turn in range(config["turns"]):
        seconds = [0.0] * len(engines)
        for number in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            engines[number].train_step(batches, 1e-4)
            seconds[number] = time.perf_counter() - began
        turns.append(seconds)
    for engine in engines:
        engine.close()
    close_device()
    return turns

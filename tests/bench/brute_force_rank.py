"""The rank program of `bench_brute_force.py`: steps of one job under several layouts, in turns."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from parallel_ranks import batches, workload_of

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import parse
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine

WARM, STEPS = 1, 3
"""Steps of a turn, of which the first are left out."""


def main(config: dict[str, Any], context: WorkerContext) -> list[list[float]]:
    """Seconds of the steps of each layout of `config`, of all `rounds`; each turn makes its engine anew."""
    spec = parse(config["job"])
    device, workload = (
        open_device(spec.train, spec.resources.per_worker, context),
        workload_of(spec, config["vocabulary"]),
    )
    layouts = [Layout.from_json(each) for each in config["layouts"]]
    found: list[list[float]] = [[] for _ in layouts]
    for _ in range(config["rounds"]):
        for layout, seconds in zip(layouts, found, strict=True):
            engine = TorchEngine(spec.engine, workload, layout, device)
            engine.initialise(0)
            some = batches(spec, layout, config["vocabulary"])
            for number in range(WARM + STEPS):
                dist.barrier()
                began = time.perf_counter()
                engine.train_step([dict(batch) for batch in some], 1e-4)
                dist.barrier()
                if number >= WARM:
                    seconds.append(time.perf_counter() - began)
            engine.close()
    close_device()
    return found

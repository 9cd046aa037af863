"""Rank programs that go wrong on purpose."""

from __future__ import annotations

import math
from typing import Any

import torch
from rank_cases import job, micro_batches, workload_of

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.device import Device, close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine


def poisoned(config: dict[str, Any], context: WorkerContext) -> list[list[int]]:
    """The last rank's weights turn to NaN before step 2. Returns, for each case, the steps that were no number."""
    device = open_device((asked := job(config["cases"][0])).train, asked.resources.per_worker, context)
    found = [_steps_that_were_nan(case, device, context) for case in config["cases"]]
    close_device()
    return found


def _steps_that_were_nan(case: dict[str, Any], device: Device, context: WorkerContext) -> list[int]:
    spec = job(case)
    workload, layout = workload_of(spec), Layout(**case["layout"])
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(spec.seed)
    for step in range(4):
        if step == 2 and context.rank_info.rank == context.rank_info.world_size - 1:
            with torch.no_grad():
                for parameter in engine.parallel.stages[-1].parameters():
                    parameter.copy_(torch.full_like(parameter, math.nan))
        metrics = engine.train_step(micro_batches(workload, spec, layout, step), 1e-3)
        if not math.isfinite(metrics.grad_norm) or not math.isfinite(metrics.loss):
            return [step]
    return []


def raising(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """One rank raises in its forward pass; the others are left in a collective."""
    (case,) = config["cases"]
    spec = job(case)
    device = open_device(spec.train, spec.resources.per_worker, context)
    workload, layout = workload_of(spec), Layout(**case["layout"])
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(spec.seed)
    if context.rank_info.rank == 1:
        engine.parallel.stages[0].register_forward_hook(_fail)
    engine.train_step(micro_batches(workload, spec, layout, 0), 1e-3)
    return {}


def _fail(*_: object) -> None:
    raise ValueError("a kernel went wrong")

"""A rank program that measures, by the same counting as a trace, the tensors of real steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from traced_cases import job_of, workload_of

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.device import COMPUTE, Device, close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.planner.step_trace import CATEGORIES
from orchestrator.planner.trace.recorded_steps import begin_recording, follow_pipeline, install_hooks, step
from orchestrator.planner.trace.recorder import Recorder
from orchestrator.planner.trace.sample_batch import sample_batch
from orchestrator.train.engines.torch_engine import TorchEngine

LETS_GO = 2e-3
"""Seconds in which gloo's thread lets go of a message's tensors, after the caller has been told of its end."""


class Patient:
    """Runs operators, the one behind a message only when the message's tensors are let go: what a rank holds would
    else depend on which of two threads the kernel runs first."""

    def __init__(self) -> None:
        self._sent = False

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one."""
        if self._sent:
            time.sleep(LETS_GO)
        self._sent = func.namespace == "c10d"
        return func(*args, **kwargs)


def measure(case: dict[str, Any], device: Device) -> dict[str, Any]:
    """Peak bytes of this rank's tensors in its third step, by category, as `orchestrator.planner.trace` counts them."""
    spec, workload, layout = job_of(case), workload_of(case), Layout(**case["layout"])
    device = Device(device.device, COMPUTE[spec.train.precision], device.group)
    batch = sample_batch(spec.data, spec.seed, spec.workload.draws, workload, layout.micro_batch)
    count = layout.accumulation(spec.train.global_batch)
    recorder = Recorder(torch.device("cpu"), run=Patient())
    with recorder:
        engine = TorchEngine(spec.engine, workload, layout, device)
        engine.initialise(spec.seed)
        install_hooks(engine, recorder)
        given = [{name: tensor.clone() for name, tensor in batch.items()} for _ in range(count)]
        with follow_pipeline(recorder):
            for _ in range(2):
                step(engine, given, 1e-3, recorder)
            begin_recording(engine, recorder)
            step(engine, given, 1e-3, recorder)
    engine.close()
    when, peak, parts = recorder.peak
    return {"peak": peak, "at_peak": dict(zip(CATEGORIES, parts, strict=True)), "when": when}


def main(config: dict[str, Any], context: WorkerContext) -> list[dict[str, Any]]:
    """Measure the cases in turn."""
    device = open_device((asked := job_of(config["cases"][0])).train, asked.resources.per_worker, context)
    found = []
    for case in config["cases"]:
        try:
            found.append(measure(case, device))
        except Exception as error:
            error.add_note(f"case {case['seed']}: {case['layout']}")
            raise
    close_device()
    return found

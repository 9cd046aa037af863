"""The choice of the parts of a base that a smaller model begins with: made once, and written in the run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.rank_messages import broadcast_json
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.storage.run_directory import RunDir
from workloads.inference import with_weights
from workloads.model.importance import gradient, magnitude, scores_as_json
from workloads.model.shrink import Kept, Shrunk, kept_units
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch

FILE = "shrink.json"
"""The document of a run directory with the kept numbers and the scores."""
AT_ONCE = 8
"""Samples whose gradients are measured together."""


def with_chosen_parts(
    inputs: TrainingInputs,
    run: str,
    device: torch.device,
    context: WorkerContext,
    retry: Retry,
    *,
    writes: bool,
) -> TrainingInputs:
    """Return the inputs with the parts of the base chosen, if the run begins as a part of one. All ranks call this
    together.

    The first rank measures the importance of columns and heads, and writes FILE unless it is there. The others take
    what it has read or measured, so that every attempt and layout begins with the same model.

    Args:
        inputs: the inputs of training.
        run: the run directory.
        device: the device of this rank, on which gradients are measured. It holds the whole base meanwhile.
        context: this rank's connection to the controller.
        retry: how to retry calls that need storage.
        writes: whether the task may write; a replay may not.
    """
    weights = getattr(inputs.workload, "pretrained", None)
    if not isinstance(weights, Shrunk):
        return inputs
    workload = cast(TransformerWorkload, inputs.workload)
    choice = None
    context.set_waiting(True)
    if dist.get_rank() == 0:
        directory = RunDir(run)
        # Measured once and then read: sums of gradients in another order could choose another head, and commits have
        # the shapes of the first choice.
        choice = retry(directory.read_json, FILE)
        if choice is None:
            choice = _choice(inputs, workload, weights, device, context)
            if writes:
                retry(directory.write_json, FILE, choice)
    kept = Kept.of_json(broadcast_json(choice)["kept"])
    context.set_waiting(False)
    return replace(inputs, workload=replace(workload, pretrained=weights.keeping(kept)))


def _choice(
    inputs: TrainingInputs,
    workload: TransformerWorkload,
    weights: Shrunk,
    device: torch.device,
    context: WorkerContext,
) -> dict[str, Any]:
    """Return what is kept, and by which scores, as plain data."""
    if not weights.has_choice:
        return {"kept": Kept(weights.layers).to_json()}
    spec = inputs.job.spec
    shrink = spec.workload.shrink
    assert shrink is not None
    base = replace(workload, config=weights.base, pretrained=weights.stored)

    def read(name: str) -> Tensor:
        return base.initial(name, spec.seed)

    if shrink.importance == "magnitude":
        scores = magnitude(with_weights(base, read), weights.base)
    else:
        model = with_weights(base, read, device).requires_grad_(False)
        batches = _measured(inputs, shrink.samples, device, context)
        scores = gradient(model, weights.base, base.loss, batches)
    kept = kept_units(weights.config, weights.base, weights.layers, scores)
    choice: dict[str, Any] = {"importance": shrink.importance}
    if shrink.importance == "gradient":
        choice["samples"] = shrink.samples
    return {**choice, "kept": kept.to_json(), "scores": scores_as_json(scores)}


def _measured(
    inputs: TrainingInputs, samples: int, device: torch.device, context: WorkerContext
) -> Iterator[Batch]:
    """Yield the first samples of training, a few at a time."""
    context.begin_work("importance of the base's columns and heads", "batches", math.ceil(samples / AT_ONCE))
    for first in range(0, samples, AT_ONCE):
        batch, _ = inputs.batches.batch(first, min(AT_ONCE, samples - first))
        yield {name: tensor.to(device) for name, tensor in batch.items()}
        context.progressed()
    context.end_work()

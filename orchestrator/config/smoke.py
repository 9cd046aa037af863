"""A trial of a job in a few steps: the same model, data, objective and layout, and everything that follows training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, parse
from orchestrator.train.config import TrainSpec
from orchestrator.train.rollouts.config import RolloutSpec

STEPS, HALF = 12, 6
"""Steps of the trial, more if a rollout has more. It commits and evaluates in the middle and at the end."""
BATCHES = 4
"""Maximum number of global batches of a held-out set to evaluate."""
SAMPLES = 16
"""Maximum number of samples by which importance is measured."""
SUFFIX = "-smoke"


def smoke_of(spec: JobSpec, is_alike: Callable[[JobSpec], bool]) -> JobSpec:
    """Return the job in a few small steps, under another name.

    The global batch is the smallest fraction of the job's for which `is_alike` holds. The trial registers nothing,
    does not search and does not stop early. Its weights start fresh if the job continues another run. The export
    stays in the run directory.
    """
    document = spec.model_dump(mode="json")
    document["name"] = spec.name[: 63 - len(SUFFIX)] + SUFFIX
    document["tune"] = document["stop_when"] = None
    of_rollout = spec.reading.steps
    half = min(math.ceil(HALF / of_rollout) * of_rollout, spec.train.steps)
    steps = min(STEPS // HALF * half, spec.train.steps)
    shorter(spec.train, steps, document)["train"]["steps"] = steps
    document["train"] |= {"continue_from": None, "thaw": {}}
    if spec.train.thaw:  # it may train the parameters that a group matches
        document["train"]["optimizer"]["groups"] = []
    document["checkpoint"] |= {"every": half, "keep_every": None, "export_to": None, "push": None}
    if spec.prune is not None:
        document["prune"] = spec.prune.shortened(spec.train.steps, steps)
    if spec.workload.shrink is not None:
        document["workload"]["shrink"]["samples"] = min(spec.workload.shrink.samples, SAMPLES)
    if spec.evaluate is not None:
        document["evaluate"] |= {"every": half, "batches": min(spec.evaluate.batches or BATCHES, BATCHES)}
    document["notify"] = None
    if spec.tracking is not None:
        document["tracking"]["register_as"] = None
    return next(filter(is_alike, _smaller(document, spec.resources, spec.train, spec.rollout)))


def shorter(train: TrainSpec, steps: int, document: dict[str, Any]) -> dict[str, Any]:
    """Return the job's `document` with `steps` steps, and an optimizer whose warm-up and decay keep their shares of
    them.
    """
    optimizer = document["train"]["optimizer"]
    for key, configured_steps in (("warmup", train.warmup_steps), ("decay", train.decay_steps)):
        optimizer[key] = min(configured_steps, max(round(configured_steps / train.steps * steps), 1))
    if optimizer["warmup"] >= steps:
        optimizer["warmup"] = 0
    optimizer["decay"] = min(optimizer["decay"], steps - optimizer["warmup"])
    return document


def _smaller(
    document: dict[str, Any], resources: ResourceSpec, train: TrainSpec, rollout: RolloutSpec | None
) -> Iterator[JobSpec]:
    """Yield the trial with smaller global batches, smallest first, and last with the job's own."""
    full_batch = train.global_batch
    bitwise = train.determinism == "bitwise"
    workers = max(resources.workers.max, train.virtual_shards if bitwise else 1)
    for batch in range(min(workers, full_batch), full_batch + 1):
        if rollout and rollout.problem_with(batch):
            continue
        if full_batch % batch == 0 and not (bitwise and batch % train.virtual_shards):
            yield parse({**document, "train": {**document["train"], "global_batch": batch}})

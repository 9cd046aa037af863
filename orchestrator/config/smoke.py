"""A try of a job in a few steps: the same model, data, objective and layout, and all that comes after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.config.spec import JobSpec, parse

STEPS, HALF = 12, 6
"""Of the try; it commits and evaluates in the middle and at its end."""
BATCHES = 4
"""Most global batches of a held-out set that are evaluated."""
SUFFIX = "-smoke"


def smoke_of(spec: JobSpec, is_alike: Callable[[JobSpec], bool]) -> JobSpec:
    """The job in a few small steps, under a name of its own.

    The global batch is the smallest share of the job's under which `is_alike`. Nothing is registered, searched or ended
    early, the weights begin anew where the job goes on from another run, and the export stays in the run directory.
    """
    document = spec.model_dump(mode="json")
    document["name"] = spec.name[: 63 - len(SUFFIX)] + SUFFIX
    document["tune"] = document["stop_when"] = None
    steps = min(spec.train.steps, STEPS)
    half = min(HALF, steps)
    shorter(spec, steps, document)["train"]["steps"] = steps
    document["train"] |= {"continue_from": None, "thaw": {}}
    if spec.train.thaw:  # which may train what a group is of
        document["train"]["optimizer"]["groups"] = []
    document["checkpoint"] |= {"every": half, "keep_every": None, "export_to": None}
    if spec.evaluate is not None:
        document["evaluate"] |= {"every": half, "batches": min(spec.evaluate.batches or BATCHES, BATCHES)}
    document["notify"] = None
    if spec.tracking is not None:
        document["tracking"]["register_as"] = None
    return next(filter(is_alike, _smaller(document, spec)))


def shorter(spec: JobSpec, steps: int, document: dict[str, Any]) -> dict[str, Any]:
    """The job's `document` with an optimiser whose warm-up and decay are the same shares of so many steps."""
    optimizer = document["train"]["optimizer"]
    for key, whole in (("warmup", spec.train.warmup_steps), ("decay", spec.train.decay_steps)):
        optimizer[key] = min(whole, max(round(whole / spec.train.steps * steps), 1))
    if optimizer["warmup"] >= steps:
        optimizer["warmup"] = 0
    optimizer["decay"] = min(optimizer["decay"], steps - optimizer["warmup"])
    return document


def _smaller(document: dict[str, Any], spec: JobSpec) -> Iterator[JobSpec]:
    """The try with smaller global batches, the smallest first, and last with that of the job."""
    whole = spec.train.global_batch
    bitwise = spec.train.determinism == "bitwise"
    least = max(spec.resources.workers.max, spec.train.virtual_shards if bitwise else 1)
    for batch in range(min(least, whole), whole + 1):
        if whole % batch == 0 and not (bitwise and batch % spec.train.virtual_shards):
            yield parse({**document, "train": {**document["train"], "global_batch": batch}})

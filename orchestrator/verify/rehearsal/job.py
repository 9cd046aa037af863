"""The job of a rehearsal: the user's job with few steps, a small model, little data and few ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.smoke import shorter
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.config import DataSpec, Source
from orchestrator.parallel.layout import Layout
from orchestrator.prune.config import PruneSpec
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.train.config import TrainSpec
from orchestrator.verify.rehearsal.layouts import sequences_of, smaller
from orchestrator.verify.rehearsal.small_model import SmallModel, small_model
from orchestrator.verify.rehearsal.text import excerpt

STEPS = 5
"""The steps of a rehearsal: three, one in which a rank is killed, and one under another layout."""
HELD_OUT = 0.1
"""The minimum share of held-out documents, so that the few documents yield some."""
FLOPS = 5e10
"""The FLOPs of a step, on all ranks together: seconds on the cores of a laptop."""
SHORTEST = 128
"""The number of tokens below which sequences are not halved further."""
HOURS = 0.2
"""The hours after which a run of a rehearsal ends with a commit."""


@dataclass(frozen=True)
class Rehearsed:
    """The job of a rehearsal under its `layout`, and the parts of the user's job that it leaves out, one line each."""

    spec: JobSpec
    layout: Layout
    notes: tuple[str, ...]

    def under(self, layout: Layout) -> JobSpec:
        """Return the same run under another layout."""
        return parse({**self.spec.model_dump(mode="json"), **_ranks(self.spec.resources, layout)})


def rehearsed(job: ResolvedJob, layout: Layout, folder: Path) -> Rehearsed:
    """Return the small job, with data and model in `folder`.

    Raises InputError if the data cannot be read, or if the model cannot be made small.
    """
    spec, small = job.spec, smaller(layout)
    if small.offload != "none" and not _gpu(spec.resources):
        small = dataclasses.replace(small, offload="none")
    model = small_model(job, small, folder / "model")
    sequences = sequences_of(small, spec.train)
    document = _short(
        spec.model_dump(mode="json"), train=spec.train, prune=spec.prune, resources=spec.resources
    )
    document["workload"] |= model.changes
    document["distill"] = None  # a small student fits no teacher
    document["train"]["global_batch"] = sequences
    document["data"] |= _little(spec.data, folder)
    length = _length(job, small, model, sequences)
    document["data"]["sequence_length"] = length
    if length != spec.data.sequence_length or small.pp > 1 or small.cp > 1:
        document["train"]["sequence_warmup"] = None
    if document["evaluate"]:
        for name, held_out in document["evaluate"]["sets"].items():
            held_out["sources"] = _excerpt(
                spec.set_sources[name][1], f"evaluate.sets.{name}.sources", spec.data, folder
            )
    document |= _ranks(spec.resources, small)
    notes = [
        *model.notes,
        *_left_out(
            spec.train,
            spec.resources,
            has_tasks=bool(spec.evaluate and spec.evaluate.tasks),
            has_teacher=spec.distill is not None,
            sends=bool(spec.tracking or spec.sinks or spec.notify),
        ),
    ]
    if model.changes:
        notes.insert(0, f"the model had {model.parameters:,} of {job.shape.parameters:,} parameters")
    if length != spec.data.sequence_length:
        notes.append(f"sequences had {length} of {spec.data.sequence_length} tokens")
    if small.world != layout.world:
        notes.append(f"there were {small.world} of {layout.world} ranks")
    return Rehearsed(parse(document, "the rehearsal"), small, tuple(notes))


def _short(
    document: dict[str, Any], train: TrainSpec, prune: PruneSpec | None, resources: ResourceSpec
) -> dict[str, Any]:
    """Return a job file with few steps, a commit after each, and no effects beyond this machine.

    Args:
        document: the job file.
        train, prune, resources: these parts of the job.
    """
    document = shorter(train, STEPS, document)
    document |= {
        "name": "rehearsal",
        "stop_when": None,
        "tune": None,
        "tracking": None,
        "sinks": None,
        "notify": None,
    }
    document["train"] |= {
        "steps": STEPS,
        "compile": train.compile and _gpu(resources),
        "thaw": {},
        "continue_from": None,
    }
    document["train"]["optimizer"]["groups"] = []  # they may name layers that the small model lacks
    if prune is not None:
        document["prune"] = prune.shortened(train.steps, STEPS) | {"match": []}
    document["checkpoint"] |= {
        "every": 1,
        "keep": STEPS,
        "keep_every": None,
        "keep_best": False,
        "snapshot_every": None,
        **NO_EXPORT,
    }
    document["limits"] = {"hours": HOURS}
    if document["evaluate"]:
        document["evaluate"] |= {"batches": 2, "tasks": [], "where": "gang", "every": STEPS + 1}
        document["evaluate"] |= {"at_start": False, "at_end": False}
    return document


def _ranks(resources: ResourceSpec, layout: Layout) -> dict[str, Any]:
    """Return the keys of a job for that layout on this machine."""
    gpu = _gpu(resources)
    worker: dict[str, Any] = {"cpu": 1, "gpu": resources.per_worker.gpu if gpu else 0, "labels": {}}
    return {
        "parallel": layout.pins,
        "resources": {"workers": layout.world, "per_worker": worker, "must_fit": False},
    }


def _gpu(resources: ResourceSpec) -> bool:
    """Return whether the job wants GPUs and this machine has some."""
    if not resources.per_worker.gpu:
        return False
    import torch

    return torch.cuda.is_available()


def _little(data: DataSpec, folder: Path) -> dict[str, Any]:
    """Return the keys of `data` that make it small."""
    result: dict[str, Any] = {"cache": str(folder / "data")}
    if data.samples is not None:
        return result
    result["sources"] = _excerpt(data.sources, "data.sources", data, folder)
    held_out = data.validation
    if held_out is not None:
        sources = _excerpt(held_out.sources, "data.validation.sources", data, folder)
        share = held_out.share and max(held_out.share, HELD_OUT)
        result["validation"] = {"share": share} if share else {"sources": sources}
    return result


def _excerpt(sources: Sequence[Source], where: str, data: DataSpec, folder: Path) -> list[dict[str, Any]]:
    result = excerpt(sources, where, data.on_error, folder / "text") if sources else []
    return [source.model_dump(mode="json") for source in result]


def _length(job: ResolvedJob, layout: Layout, model: SmallModel, sequences: int) -> int:
    """Return the tokens of a sequence: as in the job, or halved until a step takes seconds."""
    length = job.spec.data.sequence_length
    if job.spec.data.samples is not None:
        return length
    parts = 2 * layout.cp * layout.tp
    while (
        length % 2 == 0
        and length // 2 >= SHORTEST
        and length // 2 % parts == 0
        and 6.0 * model.parameters * length * sequences > FLOPS
    ):
        length //= 2
    return length


def _left_out(
    train: TrainSpec, resources: ResourceSpec, *, has_tasks: bool, has_teacher: bool, sends: bool
) -> list[str]:
    """Return the parts of a job that the rehearsal does not try, one line each.

    Args:
        train, resources: these parts of the job.
        has_tasks: whether it evaluates tasks.
        has_teacher: whether it learns from a teacher.
        sends: whether it sends anything to tracking, sinks or notify.
    """
    result = []
    if resources.per_worker.gpu and not _gpu(resources):
        result.append("ranks had CPUs instead of GPUs")
        if train.compile:
            result.append("train.compile was false")
    if train.optimizer.groups:
        result.append("train.optimizer.groups were left out")
    if has_tasks:
        result.append("evaluate.tasks were not run")
    if train.continue_from:
        result.append("the commit of train.continue_from was not read")
    if has_teacher:
        result.append("the teacher of distill was left out")
    if sends:
        result.append("nothing was sent to tracking, sinks or notify")
    return result

"""The job of a rehearsal: that of the user with few steps, a small model, a little data and few ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.checkpoint import NO_EXPORT
from orchestrator.config.data import Source
from orchestrator.config.smoke import shorter
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.verify.rehearsal.layouts import sequences_of, smaller
from orchestrator.verify.rehearsal.model import SmallModel, small_model
from orchestrator.verify.rehearsal.text import excerpt

STEPS = 5
"""Steps of a rehearsal: three, one in which a rank is killed, and one under another layout."""
HELD_OUT = 0.1
"""Share of the few documents that is held out at least, so that there are some."""
FLOPS = 5e10
"""Of a step, on all ranks together: seconds on the cores of a laptop."""
SHORTEST = 128
"""Tokens to which sequences are halved at most."""
HOURS = 0.2
"""After which a run of a rehearsal ends with a commit."""


@dataclass(frozen=True)
class Rehearsed:
    """The job of a rehearsal under its `layout`, and what of the user's job is not in it, line by line."""

    spec: JobSpec
    layout: Layout
    notes: tuple[str, ...]

    def under(self, layout: Layout) -> JobSpec:
        """The same run under another layout."""
        return parse({**self.spec.model_dump(mode="json"), **_ranks(self.spec, layout)})


def rehearsed(job: ResolvedJob, layout: Layout, folder: Path) -> Rehearsed:
    """The small job, whose data and model are in `folder`. Raises InputError if the data cannot be read, or there is no
    small model."""
    spec, small = job.spec, smaller(layout)
    if small.offload != "none" and not _gpu(spec):
        small = dataclasses.replace(small, offload="none")
    model = small_model(job, small, folder / "model")
    sequences = sequences_of(small, spec)
    document = _short(spec)
    document["workload"] |= model.changes
    document["train"]["global_batch"] = sequences
    document["data"] |= _little(spec, folder)
    length = _length(job, small, model, sequences)
    document["data"]["sequence_length"] = length
    if length != spec.data.sequence_length or small.pp > 1 or small.cp > 1:
        document["train"]["sequence_warmup"] = None
    if document["evaluate"]:
        for name, each in document["evaluate"]["sets"].items():
            each["sources"] = _excerpt(
                spec.set_sources[name][1], f"evaluate.sets.{name}.sources", spec, folder
            )
    document |= _ranks(spec, small)
    notes = [*model.notes, *_left_out(spec)]
    if model.changes:
        notes.insert(0, f"the model had {model.parameters:,} of {job.shape.parameters:,} parameters")
    if length != spec.data.sequence_length:
        notes.append(f"sequences had {length} of {spec.data.sequence_length} tokens")
    if small.world != layout.world:
        notes.append(f"there were {small.world} of {layout.world} ranks")
    return Rehearsed(parse(document, "the rehearsal"), small, tuple(notes))


def _short(spec: JobSpec) -> dict[str, Any]:
    """The job with few steps and a commit after each, and nothing that reaches beyond this machine."""
    document = shorter(spec, STEPS, spec.model_dump(mode="json"))
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
        "compile": spec.train.compile and _gpu(spec),
        "thaw": {},
        "continue_from": None,
    }
    document["train"]["optimizer"]["groups"] = []  # of layers that the small model may lack
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


def _ranks(spec: JobSpec, layout: Layout) -> dict[str, Any]:
    """The keys of a job under that layout on this machine."""
    gpu = _gpu(spec)
    worker: dict[str, Any] = {"cpu": 1, "gpu": spec.resources.per_worker.gpu if gpu else 0, "labels": {}}
    return {
        "parallel": layout.pins,
        "resources": {"workers": layout.world, "per_worker": worker, "must_fit": False},
    }


def _gpu(spec: JobSpec) -> bool:
    """Whether the job wants GPUs and this machine has some."""
    if not spec.resources.per_worker.gpu:
        return False
    import torch

    return torch.cuda.is_available()


def _little(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """The keys of `data` that make it small."""
    data = spec.data
    found: dict[str, Any] = {"cache": str(folder / "data")}
    if data.samples is not None:
        return found
    found["sources"] = _excerpt(data.sources, "data.sources", spec, folder)
    held_out = data.validation
    if held_out is not None:
        sources = _excerpt(held_out.sources, "data.validation.sources", spec, folder)
        share = held_out.share and max(held_out.share, HELD_OUT)
        found["validation"] = {"share": share} if share else {"sources": sources}
    return found


def _excerpt(sources: Sequence[Source], where: str, spec: JobSpec, folder: Path) -> list[dict[str, Any]]:
    found = excerpt(sources, where, spec.data.on_error, folder / "text") if sources else []
    return [source.model_dump(mode="json") for source in found]


def _length(job: ResolvedJob, layout: Layout, model: SmallModel, sequences: int) -> int:
    """Tokens of a sequence: as in the job, or halved until a step takes seconds."""
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


def _left_out(spec: JobSpec) -> list[str]:
    """What of the job is not tried, one line each."""
    found = []
    if spec.resources.per_worker.gpu and not _gpu(spec):
        found.append("ranks had processors in place of GPUs")
        if spec.train.compile:
            found.append("train.compile was false")
    if spec.train.optimizer.groups:
        found.append("train.optimizer.groups were left out")
    if spec.evaluate and spec.evaluate.tasks:
        found.append("evaluate.tasks were not run")
    if spec.train.continue_from:
        found.append("the commit of train.continue_from was not read")
    if spec.tracking or spec.sinks or spec.notify:
        found.append("nothing was sent to tracking, sinks or notify")
    return found

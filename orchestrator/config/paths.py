"""Paths in a job file. Relative paths refer to the command's current folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.workers.preemption import GRACE
from orchestrator.config.spec import JobSpec
from orchestrator.data.config import SHIPPED, Source

REFERENCE = "stage:"
"""The prefix that refers to another stage of the same job file."""


def resolve_paths(spec: JobSpec, base: Path) -> JobSpec:
    """Return the job with relative local paths made absolute against `base`, so that they mean the same on every
    node.
    """
    validation = spec.data.validation
    evaluate = spec.evaluate
    if validation:
        validation = validation.model_copy(update={"sources": _absolute(validation.sources, base)})
    if evaluate:
        sets = {
            name: each.model_copy(update={"sources": _absolute(each.sources, base)})
            for name, each in evaluate.sets.items()
        }
        tasks = [absolute(path, base) for path in evaluate.tasks]
        evaluate = evaluate.model_copy(update={"sets": sets, "tasks": tasks})
    tokenizer = spec.data.tokenizer
    if isinstance(tokenizer, str) and tokenizer:  # empty if the samples are the user's own
        tokenizer = absolute(tokenizer, base)
    template = spec.data.chat_template
    if template and not template.startswith(SHIPPED):
        template = absolute(template, base)
    cache = spec.data.cache and absolute(spec.data.cache, base)
    target = spec.checkpoint.export_to and absolute(spec.checkpoint.export_to, base)
    prices = spec.limits.prices and absolute(spec.limits.prices, base)
    notices = spec.resources.notices
    if notices and notices not in GRACE:
        notices = absolute(notices, base)
    model = _absolute_model(spec.workload.model, base)
    distill = spec.distill
    if distill:
        teacher = distill.teacher
        placed = _absolute_model(teacher, base) if teacher.startswith("hf:") else absolute(teacher, base)
        distill = distill.model_copy(update={"teacher": placed})
    begins = spec.workload.init_from and absolute(spec.workload.init_from, base)
    before = spec.train.continue_from
    if before:
        before = before.model_copy(update={"run": absolute(before.run, base)})
    tracking = spec.tracking
    if tracking and (match := re.fullmatch(r"sqlite:///([^/].*)", tracking.uri)):
        tracking = tracking.model_copy(update={"uri": f"sqlite:///{base / match[1]}"})
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(
                update={
                    "sources": _absolute(spec.data.sources, base),
                    "chat_template": template,
                    "validation": validation,
                    "tokenizer": tokenizer,
                    "clean": [step.located(partial(absolute, base=base)) for step in spec.data.clean],
                    "cache": cache,
                }
            ),
            "evaluate": evaluate,
            "workload": spec.workload.model_copy(update={"model": model, "init_from": begins}),
            "train": spec.train.model_copy(update={"continue_from": before}),
            "distill": distill,
            "tracking": tracking,
            "checkpoint": spec.checkpoint.model_copy(update={"export_to": target}),
            "limits": spec.limits.model_copy(update={"prices": prices}),
            "resources": spec.resources.model_copy(update={"notices": notices}),
        }
    )


def _absolute_model(model: str, base: Path) -> str:
    return "hf:" + absolute(model[3:], base) if model.startswith("hf:") else model


def _absolute(sources: Sequence[Source], base: Path) -> list[Source]:
    def moved(source: Source) -> Source:
        uris = [absolute(uri, base) for uri in source.uris]
        return source.model_copy(update={"uri": uris[0] if isinstance(source.uri, str) else uris})

    return [moved(source) for source in sources]


def absolute(uri: str, base: Path) -> str:
    """Return `uri` itself if it has a protocol or names a stage, else its absolute path relative to `base`."""
    return uri if "://" in uri or uri.startswith(REFERENCE) else os.path.normpath(base / uri)

"""Paths in a job file: relative ones are relative to the current folder of the command."""

from __future__ import annotations

import os
import re
from pathlib import Path

from orchestrator.job.spec import JobSpec


def resolve_paths(spec: JobSpec, base: Path) -> JobSpec:
    """The job with relative local paths made absolute against `base`, so that they mean the same on every node."""
    sources = [s.model_copy(update={"uri": absolute(s.uri, base)}) for s in spec.data.sources]
    tokenizer = spec.data.tokenizer
    if isinstance(tokenizer, str):
        tokenizer = absolute(tokenizer, base)
    cache = spec.data.cache and absolute(spec.data.cache, base)
    target = spec.checkpoint.export_to and absolute(spec.checkpoint.export_to, base)
    prices = spec.limits.prices and absolute(spec.limits.prices, base)
    model = spec.workload.model
    if model.startswith("hf:"):
        model = "hf:" + absolute(model[3:], base)
    tracking = spec.tracking
    if tracking and (match := re.fullmatch(r"sqlite:///([^/].*)", tracking.uri)):
        tracking = tracking.model_copy(update={"uri": f"sqlite:///{base / match[1]}"})
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"sources": sources, "tokenizer": tokenizer, "cache": cache}),
            "workload": spec.workload.model_copy(update={"model": model}),
            "tracking": tracking,
            "checkpoint": spec.checkpoint.model_copy(update={"export_to": target}),
            "limits": spec.limits.model_copy(update={"prices": prices}),
        }
    )


def absolute(uri: str, base: Path) -> str:
    """`uri` itself if it has a protocol, else the absolute path of it relative to `base`."""
    return uri if "://" in uri or "::" in uri else os.path.normpath(base / uri)

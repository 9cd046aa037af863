"""The paths and URIs that a job reads and writes, and those of them that exist on one machine only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.spec import JobSpec
from orchestrator.data.config import DataSpec
from orchestrator.observe.config import TrackingSpec


def reads(spec: JobSpec, mounted: str = "") -> list[str]:
    """Return the local paths that workers read, except those under `mounted`. Every worker must have them."""
    return [path for path in _read(spec) if _is_local(path, mounted)]


def writes(spec: JobSpec, mounted: str = "") -> list[str]:
    """Return the keys with local paths that are written, except those under `mounted`. A lost node takes them along."""
    return [
        text for text, path in _written(spec.data, spec.checkpoint, spec.tracking) if _is_local(path, mounted)
    ]


def named(spec: JobSpec) -> list[str]:
    """Return every path and URI that the job reads or writes."""
    return _read(spec) + [path for _, path in _written(spec.data, spec.checkpoint, spec.tracking)]


def _read(spec: JobSpec) -> list[str]:
    tokenizer, model = spec.data.tokenizer, spec.workload.model
    paths = [place for source in spec.data.sources for place in source.places]
    paths += [
        place for _, sources in spec.set_sources.values() for source in sources for place in source.places
    ]
    paths += spec.evaluate.tasks if spec.evaluate else []
    paths += [tokenizer] if isinstance(tokenizer, str) else []
    paths += [model.removeprefix("hf:")] if model.startswith("hf:") else []
    notices = spec.resources.notices
    paths += [notices] if notices and notices not in ("aws", "gcp", "azure") else []
    return paths + ([spec.limits.prices] if spec.limits.prices else [])


def _written(
    data: DataSpec, checkpoint: CheckpointSpec, tracking: TrackingSpec | None
) -> Iterator[tuple[str, str]]:
    """Yield each key with its value, and the path in it."""
    if tracking:
        uri = tracking.uri
        path = uri.removeprefix("sqlite:///") if uri.startswith("sqlite:") else uri
        yield f"tracking.uri {uri}", path
    if checkpoint.export_to:
        yield f"checkpoint.export_to {checkpoint.export_to}", checkpoint.export_to
    if data.cache:
        yield f"data.cache {data.cache}", data.cache


def _is_local(path: str, mounted: str) -> bool:
    path = path.removeprefix("file://")
    inside = bool(mounted) and PurePosixPath(path).is_relative_to(mounted)
    return "://" not in path and not inside

"""The paths and URIs that a job reads and writes, and those of them that exist on one machine only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from orchestrator.config.spec import JobSpec
from orchestrator.models.named_commit import split_tag


def read_paths(spec: JobSpec) -> list[str]:
    """Return every path and URI that workers read. Each worker must have those that are local."""
    tokenizer, model = spec.data.tokenizer, spec.workload.model
    paths = [uri for _, source in spec.every_source for uri in source.uris]
    paths += spec.evaluate.tasks if spec.evaluate else []
    paths += [tokenizer] if isinstance(tokenizer, str) else []
    paths += [model.removeprefix("hf:")] if model.startswith("hf:") else []
    paths += [split_tag(spec.distill.teacher.removeprefix("hf:"))[0]] if spec.distill else []
    notices = spec.resources.notices
    paths += [notices] if notices and notices not in ("aws", "gcp", "azure") else []
    return paths + ([spec.limits.prices] if spec.limits.prices else [])


def written_paths(spec: JobSpec) -> dict[str, str]:
    """Return every path and URI that is written, by its key with its value. A lost node takes local ones along."""
    result = {}
    if spec.tracking:
        uri = spec.tracking.uri
        path = uri.removeprefix("sqlite:///") if uri.startswith("sqlite:") else uri
        result[f"tracking.uri {uri}"] = path
    if spec.checkpoint.export_to:
        result[f"checkpoint.export_to {spec.checkpoint.export_to}"] = spec.checkpoint.export_to
    if spec.data.cache:
        result[f"data.cache {spec.data.cache}"] = spec.data.cache
    return result


def local(paths: Iterable[str], mounted: str = "") -> list[str]:
    """Return those of the paths that exist on one machine only: local ones that are not under `mounted`."""
    return [path for path in paths if _is_local(path, mounted)]


def _is_local(path: str, mounted: str) -> bool:
    path = path.removeprefix("file://")
    inside = bool(mounted) and PurePosixPath(path).is_relative_to(mounted)
    return "://" not in path and not inside

"""The paths and URIs that a job reads and writes, and those of them that exist on one machine only."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import PurePosixPath

from orchestrator.config.spec import JobSpec
from orchestrator.data.config import SHIPPED
from orchestrator.data.sources.listing import LIST
from orchestrator.models.named_commit import split_tag
from orchestrator.storage.uri import is_local, local_path


def read_paths(spec: JobSpec) -> list[str]:
    """Return every path and URI that workers or the controller read. Each worker must have those that are local."""
    tokenizer, workload = spec.data.tokenizer, spec.workload
    template, notices = spec.data.chat_template, spec.resources.notices
    paths = [uri for _, source in spec.every_source for uri in source.uris]
    paths += spec.evaluate.tasks if spec.evaluate else []
    paths += [tokenizer] if isinstance(tokenizer, str) else []
    paths += [template] if template and not template.startswith(SHIPPED) else []
    paths += [workload.model.removeprefix("hf:")] if workload.model.startswith("hf:") else []
    runs = [workload.init_from, *(reward.model for reward in spec.rewards)]
    runs += [spec.distill.teacher.removeprefix("hf:")] if spec.distill else []
    runs += [spec.train.continue_from.run] if spec.train.continue_from else []
    paths += [split_tag(run)[0] for run in runs if run]
    paths += [notices] if notices and notices not in ("aws", "gcp", "azure") else []
    return paths + ([spec.limits.prices] if spec.limits.prices else [])


def is_here(uri: str) -> bool:
    """Return whether a path, or a pattern of paths, names a file on this machine or a folder that is not empty. No
    store is asked, and what a list of files names is not looked up.
    """
    if not is_local(uri) or uri.endswith(LIST):
        return False
    path = local_path(uri)
    if os.path.isdir(path):
        return any(os.scandir(path))
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


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

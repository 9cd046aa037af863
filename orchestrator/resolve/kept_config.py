"""The configuration of a pretrained folder, as every commit of a run keeps it.

A folder may be edited, moved or removed while its run goes on. The run's own configuration is what its weights are
computed with: a resume, an evaluation, an export and `model()` all take it from the commit.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.identity import KEPT
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from workloads.hf.hf_config import FOLDER, FolderConfig, config_differences, folder_config
from workloads.own.object_reference import is_built_in, is_object_reference

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest

MODEL = "workload.model"
OWN_FOLDER = "workload.changes.folder"
HINT = "put the file back as it was, or begin another run"


def kept_config(commit: CommitManifest | None) -> FolderConfig | None:
    """The configuration that the run of a commit began with; None if it has no folder, or an earlier version made the
    commit."""
    found = commit.meta.get(KEPT) if commit else None
    return FolderConfig(**found) if found else None


def config_json(kept: FolderConfig | None) -> dict[str, Any] | None:
    """The configuration as plain data."""
    return asdict(kept) if kept else None


def config_to_keep(spec: JobSpec, kept: FolderConfig | None = None) -> FolderConfig | None:
    """What the run of the job has `kept`, else what is in the folder that the job names; None if it names none. Raises
    WorkloadError if the folder has no configuration."""
    folder = _folder_of(spec)
    return kept or (folder_config(folder) if folder is not None else None)


def check_same_config(spec: JobSpec, commit: CommitManifest | None, where: str) -> None:
    """Raise InputError, which names every key, if the configuration in the job's folder is not that which the run of
    the commit at `where` began with. A folder that is gone is not needed for it."""
    if (kept := kept_config(commit)) is not None:
        check_config(spec, kept, where)


def check_config(spec: JobSpec, kept: FolderConfig, where: str) -> None:
    """As `check_same_config`, for what the run or the search at `where` has kept."""
    folder = _folder_of(spec)
    if folder is None:
        return
    problems = Problems()
    for file, key, was, now in config_differences(folder, kept):
        with problems.noted():
            what = f"{key} is {was} in this run and {now} in {folder}/{file}"
            raise InputError(what, where, HINT)
    problems.raise_noted()


def check_read_config(spec: JobSpec, commit: CommitManifest, where: str) -> None:
    """As `check_same_config`, for a class that reads its folder itself and cannot take what the run has kept."""
    if is_object_reference(spec.workload.model):
        check_same_config(spec, commit, where)


def _folder_of(spec: JobSpec) -> str | None:
    """The folder whose configuration the job's model has; None if it has that of none."""
    asked = spec.workload
    if asked.model.startswith(FOLDER):
        return asked.model.removeprefix(FOLDER)
    if is_object_reference(asked.model) and is_built_in(asked.model):
        folder = asked.changes.get("folder")
        return folder if isinstance(folder, str) else None
    return None

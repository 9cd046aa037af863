"""The configuration of a pretrained folder, as every commit of a run stores it.

The folder may be edited, moved or removed while its run continues. The run's weights belong to the configuration it
began with, so a resume, an evaluation, an export and `model()` all take the configuration from the commit.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.identity import KEPT
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.workload import WorkloadSpec
from workloads.hf.files.hf_config import FOLDER, FolderConfig, config_differences, folder_config
from workloads.own.object_reference import is_built_in, is_object_reference

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest

MODEL = "workload.model"
HINT = "restore the file, or start a new run"


def kept_config(commit: CommitManifest | None) -> FolderConfig | None:
    """Return the configuration that a commit's run began with; None if it has no folder, or if an earlier version
    made the commit.
    """
    stored = commit.meta.get(KEPT) if commit else None
    return FolderConfig(**stored) if stored else None


def config_json(kept: FolderConfig | None) -> dict[str, Any] | None:
    """Return the configuration as plain data."""
    return asdict(kept) if kept else None


def config_to_keep(workload: WorkloadSpec, kept: FolderConfig | None = None) -> FolderConfig | None:
    """Return the configuration `kept` by the job's run, else the one in the folder that the job names; None if it
    names none.

    Raises WorkloadError if the folder has no configuration.
    """
    folder = _folder_of(workload)
    return kept or (folder_config(folder) if folder is not None else None)


def check_same_config(workload: WorkloadSpec, commit: CommitManifest | None, where: str) -> None:
    """Raise InputError with all differing keys if the configuration in the job's folder is not the one that the run
    of the commit at `where` began with.

    A missing folder is not an error.
    """
    if (kept := kept_config(commit)) is not None:
        check_config(workload, kept, where)


def check_config(workload: WorkloadSpec, kept: FolderConfig, where: str) -> None:
    """Like `check_same_config`, for the configuration that the run or search at `where` has kept."""
    folder = _folder_of(workload)
    if folder is None:
        return
    problems = Problems()
    for file, key, before, now in config_differences(folder, kept):
        with problems.noted():
            problem = f"{key} is {before} in this run and {now} in {folder}/{file}"
            raise InputError(problem, where, HINT)
    problems.raise_noted()


def check_read_config(workload: WorkloadSpec, commit: CommitManifest, where: str) -> None:
    """Like `check_same_config`, for a class that reads its folder itself and cannot use a kept configuration."""
    if is_object_reference(workload.model):
        check_same_config(workload, commit, where)


def _folder_of(workload: WorkloadSpec) -> str | None:
    """Return the folder whose configuration the job's model uses; None if it uses none."""
    if workload.model.startswith(FOLDER):
        return workload.model.removeprefix(FOLDER)
    if is_object_reference(workload.model) and is_built_in(workload.model):
        folder = workload.changes.get("folder")
        return folder if isinstance(folder, str) else None
    return None

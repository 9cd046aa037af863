"""Which model a job names as its teacher, before any of its weights is read. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from orchestrator.checkpoint.identity import KEPT, job_of_commit
from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.models.named_commit import commit_at, split_tag
from orchestrator.storage.uri import is_local
from workloads.hf.files.hf_config import FOLDER, FolderConfig, root

WHERE = "distill.teacher"
TABLE = "model.tokens.weight"
"""The table of tokens in a commit of this project's models."""
TEACHER_HINT = "give hf:<folder>, an export's folder, or a run directory"


class NamedTeacher(NamedTuple):
    """A teacher, before any of its weights is read.

    Attributes:
        spec: the teacher's model, with the student's objective.
        step: the step of the run's commit; None for a folder.
        kept: the configuration of a pretrained folder, as the teacher's run keeps it; None without one.
    """

    spec: WorkloadSpec
    step: int | None = None
    kept: FolderConfig | None = None

    @property
    def uri(self) -> str:
        """Its folder, or run directory."""
        if self.spec.init_from is None:
            return self.spec.model.removeprefix(FOLDER)
        return split_tag(self.spec.init_from)[0]


def named_teacher(teacher: str, workload: WorkloadSpec, step: int | None = None) -> NamedTeacher:
    """Return the model that a job names as its teacher, for the student's objective.

    Args:
        teacher: the value of distill.teacher.
        workload: the student.
        step: the step of a run's commit, if it was chosen before.

    Raises:
        InputError: if there is no such model.
    """
    if teacher.startswith(FOLDER):
        return NamedTeacher(_teacher_spec(workload, model=teacher))
    uri, tag = split_tag(teacher)
    if is_local(uri) and (Path(root(uri)) / "config.json").exists():
        if tag:
            raise InputError(f"{uri} is an export, which has no step", WHERE, "leave out what follows the @")
        return NamedTeacher(_teacher_spec(workload, model=f"{FOLDER}{uri}"))
    commit = commit_at(
        uri, tag if step is None else step, WHERE, "has no commit, and is not an export", TEACHER_HINT
    )
    job = job_of_commit(commit)
    hint = "export it, and name the export"
    if job is None:
        raise InputError(f"{uri} does not say which model it has trained", WHERE, hint)
    theirs = job.workload
    if theirs.adapter and theirs.adapter.kind != "bitfit":
        raise InputError(f"{uri} was trained with an adapter", WHERE, hint)
    table = commit.tensors.get(TABLE)
    is_preset = not theirs.model.startswith(FOLDER)
    # A preset has as many tokens as the run's tokenizer, which may differ from the student's.
    tokens = {"vocab_size": table.shape[0]} if table is not None and is_preset else {}
    teacher_spec = _teacher_spec(
        workload,
        model=theirs.model,
        changes={**tokens, **theirs.changes},
        mup=theirs.mup,
        implementation=theirs.implementation,
        init_from=f"{uri}@{commit.step}",
    )
    kept = commit.meta.get(KEPT)
    return NamedTeacher(teacher_spec, commit.step, FolderConfig(**kept) if kept else None)


def _teacher_spec(workload: WorkloadSpec, **model: object) -> WorkloadSpec:
    """Return the student's objective with another model, without dropout or an adapter."""
    return WorkloadSpec.model_validate(
        {
            "objective": workload.objective,
            "options": workload.options,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            **model,
        }
    )

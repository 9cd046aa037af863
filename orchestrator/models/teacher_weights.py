"""The weights of a teacher, with their checksum, and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.models.base import Base, named_base, tokens_that_differ
from orchestrator.models.named_teacher import TEACHER_HINT, WHERE, named_teacher
from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FOLDER, FolderConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TeacherModel:
    """A teacher and its weights.

    Attributes:
        spec: the teacher's model, with the student's objective.
        base: the weights, with their checksum.
        kept: the configuration of a pretrained folder, as the teacher's run keeps it; None without one.
    """

    spec: WorkloadSpec
    base: Base
    kept: FolderConfig | None = None

    @property
    def location(self) -> str:
        """Where it is, for messages."""
        return self.base.uri if self.base.step is None else f"{self.base.uri}@{self.base.step}"


def teacher_model(
    teacher: str, workload: WorkloadSpec, known_base: Base | None = None, step: int | None = None
) -> TeacherModel:
    """Return a teacher with the checksum of its weights.

    Args:
        teacher: the value of distill.teacher.
        workload: the student.
        known_base: the teacher's weights, if their checksum was computed before.
        step: the step of a run's commit, if it was chosen before.

    Raises:
        InputError: if there is no such model, or it has no weights.
    """
    named = named_teacher(teacher, workload, known_base.step if known_base else step)
    try:
        base = known_base or named_base(named.spec, named.step)
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    except InputError as error:
        raise InputError(error.what, WHERE, error.hint) from None
    if base is None:
        raise InputError(f"{named.spec.model.removeprefix(FOLDER)} has no weights", WHERE, TEACHER_HINT)
    return TeacherModel(named.spec, base, named.kept)


def check_tokens(teacher: str, workload: WorkloadSpec, tokenizer: Tokenizer) -> None:
    """Raise InputError if the teacher has another tokenizer than the student. Both read the same ids.

    Args:
        teacher: the value of distill.teacher.
        workload: the student.
        tokenizer: its tokenizer.
    """
    named = named_teacher(teacher, workload)
    differing = tokens_that_differ(named.uri, named.step is not None, tokenizer)
    if differing:
        count = len(differing)
        problem = f"{count} tokens of {named.uri} have other ids in the student's tokenizer, such as {differing[0]!r}"
        raise InputError(problem, WHERE, "set data.tokenizer to the teacher's, or train another teacher")

"""The parts of a distilled run: the student with its inner states, its teacher, and the stored logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from orchestrator.data.store.tokens import Tokens
from orchestrator.models.base import Base
from orchestrator.models.teacher_weights import teacher_model
from orchestrator.resolve.teacher import (
    check_vocabularies,
    compared,
    teacher_workload,
)
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.distillation.config import DistillSpec
from orchestrator.train.distillation.logits_key import logits_key
from orchestrator.train.distillation.stored_logits import StoredLogits
from workloads.workload import Workload


@dataclass(frozen=True)
class Distilled:
    """The parts of a distilled run.

    Attributes:
        inputs: the run's inputs; the student shows what the loss compares.
        teacher: the teacher, showing the same; None if steps read its stored logits.
        base: the teacher's weights.
        stored: the stored logits; None if the teacher runs in every step.
    """

    inputs: TrainingInputs
    teacher: Workload | None
    base: Base
    stored: StoredLogits | None


def distilled_of(
    distill: DistillSpec | None,
    base: Base | None,
    inputs: TrainingInputs,
    tokens: Tokens,
    retry: Retry,
) -> Distilled | None:
    """Return the parts of a distilled run; None without a teacher.

    Args:
        distill: what the job says of it.
        base: the teacher's weights; None in a task that only evaluates, which says how good the student is.
        inputs: the run's inputs.
        tokens: the prepared data.
        retry: how to retry reads.

    Raises:
        InputError: if the teacher is missing or does not fit.
    """
    if distill is None or base is None:
        return None
    spec = inputs.job.spec
    model = teacher_model(distill.teacher, spec.workload, base)
    teacher = teacher_workload(
        model,
        spec.data,
        spec.train,
        vocabulary=inputs.workload.vocabulary,
        data_format=tokens.manifest.format,
        retry=retry,
    )
    check_vocabularies(inputs.workload, teacher, model.location)
    student, teacher = compared(distill, inputs.workload, teacher)
    inputs = dataclasses.replace(inputs, workload=student)
    if distill.stored is None:
        return Distilled(inputs, teacher, base, None)
    key = logits_key(
        spec.workload, spec.data, seed=spec.seed, precision=spec.train.dtype, logits=distill.stored, base=base
    )
    stored = StoredLogits(
        key,
        tokens.folder.uri,
        inputs,
        teacher=teacher,
        logits=distill.stored,
        base=base,
        global_batch=spec.train.global_batch,
        retry=retry,
    )
    return Distilled(inputs, None, base, stored)

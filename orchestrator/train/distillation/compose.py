"""What a distilled run trains with: the student with what its layers show, its teacher, and the stored logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch.distributed as dist

from orchestrator.config.spec import JobSpec
from orchestrator.data.store.tokens import Tokens
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.resolve.base import Base
from orchestrator.resolve.teacher import (
    check_tokens,
    check_vocabularies,
    compared,
    teacher_model,
    teacher_workload,
)
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.distillation.stored_logits import StoredLogits, logits_key
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


def distilled_of(spec: JobSpec, inputs: TrainingInputs, tokens: Tokens, retry: Retry) -> Distilled | None:
    """Return the parts of a distilled run; None if the job has no teacher. All ranks call it together.

    Args:
        spec: the job.
        inputs: its inputs.
        tokens: the prepared data.
        retry: how to retry reads.

    Raises:
        InputError: if the teacher is missing or does not fit.
    """
    asked = spec.distill
    if asked is None:
        return None
    # Only rank 0 reads all of the teacher's files, for their checksum.
    mine = dataclasses.asdict(teacher_model(asked, spec.workload).base) if dist.get_rank() == 0 else None
    base = Base(**gather_json(mine)[0])
    model = teacher_model(asked, spec.workload, base)
    if spec.data.samples is None:
        check_tokens(base, tokens.tokenizer())
    teacher = teacher_workload(
        model,
        spec.data,
        spec.train,
        vocabulary=inputs.workload.vocabulary,
        data_format=tokens.manifest.format,
        retry=retry,
    )
    check_vocabularies(inputs.workload, teacher, model.place)
    student, teacher = compared(asked, inputs.workload, teacher)
    inputs = dataclasses.replace(inputs, workload=student)
    if asked.stored is None:
        return Distilled(inputs, teacher, base, None)
    key = logits_key(spec.workload, spec.data, spec.seed, spec.train.dtype, asked.stored, base)
    stored = StoredLogits(
        key,
        tokens.folder.uri,
        inputs,
        teacher=teacher,
        logits=asked.stored,
        base=base,
        global_batch=spec.train.global_batch,
        retry=retry,
    )
    return Distilled(inputs, None, base, stored)

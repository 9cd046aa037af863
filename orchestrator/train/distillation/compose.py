"""The parts of a distilled run: the student with its inner states, its teacher, and the stored logits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import xxhash

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.store.tokens import Tokens
from orchestrator.models.base import Base
from orchestrator.models.teacher_weights import teacher_model
from orchestrator.parallel.device import Device
from orchestrator.resolve.teacher import (
    check_vocabularies,
    compared,
    teacher_workload,
)
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.config import Precision
from orchestrator.train.distillation.config import DistillSpec, LogitsSpec
from orchestrator.train.distillation.stored_logits import StoredLogits
from orchestrator.train.distillation.worker_logits import WorkerLogits
from orchestrator.train.task import Task
from workloads.workload import Workload


def logits_key(
    workload: WorkloadSpec, data: DataSpec, seed: int, precision: Precision, logits: LogitsSpec, base: Base
) -> str:
    """Return a hash of everything that determines the stored logits besides the data.

    The data is identified by the folder in which they are stored.

    Args:
        workload: the student's objective and its options, which say how samples are read.
        data: the student's data.
        seed: seed of the student's run, which divides held-out text from training text.
        precision: dtype of the teacher's products.
        logits: k and the temperature.
        base: the teacher's weights.
    """
    share = data.validation.share if data.validation else None
    inputs = [
        *(base.digest, share, workload.objective, workload.options, data.labels),
        *(data.sequence_length, seed, precision, logits.k, logits.temperature),
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(inputs, sort_keys=True).encode())


@dataclass(frozen=True)
class Distilled:
    """The parts of a distilled run.

    Attributes:
        inputs: the run's inputs; the student shows what the loss compares.
        teacher: the teacher, showing the same; None if steps read its stored logits.
        base: the teacher's weights.
        stored: the stored logits, or those that teacher workers store; None if the teacher runs in every step.
    """

    inputs: TrainingInputs
    teacher: Workload | None
    base: Base
    stored: StoredLogits | WorkerLogits | None

    @property
    def are_growing(self) -> bool:
        """Whether steps may have to wait for logits; equal on every rank."""
        return isinstance(self.stored, WorkerLogits) and self.stored.are_growing


def distilled_of(
    distill: DistillSpec | None,
    base: Base | None,
    inputs: TrainingInputs,
    tokens: Tokens,
    task: Task,
    device: Device,
    context: WorkerContext,
    retry: Retry,
) -> Distilled | None:
    """Return the parts of a distilled run; None without a teacher.

    Args:
        distill: what the job says of it.
        base: the teacher's weights; None in a task that only evaluates, which says how good the student is.
        inputs: the run's inputs.
        tokens: the prepared data.
        task: says where teacher workers are found.
        device: this process's device.
        context: this process's connection to the controller.
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
    logits = distill.stored
    key = logits_key(
        spec.workload, spec.data, seed=spec.seed, precision=spec.train.dtype, logits=logits, base=base
    )
    data = tokens.folder.uri
    if logits.source == "workers":
        made = WorkerLogits(
            key,
            data,
            inputs,
            teacher=teacher,
            logits=logits,
            base=base,
            task=task,
            device=device,
            context=context,
            retry=retry,
        )
        return Distilled(inputs, None, base, made)
    stored = StoredLogits(
        key,
        data,
        inputs,
        teacher=teacher,
        logits=logits,
        base=base,
        global_batch=spec.train.global_batch,
        retry=retry,
    )
    return Distilled(inputs, None, base, stored)


def make_logits(
    distill: DistillSpec,
    base: Base | None,
    inputs: TrainingInputs,
    tokens: Tokens,
    task: Task,
    device: Device,
    context: WorkerContext,
    retry: Retry,
) -> dict[str, int]:
    """Compute logits for the ranks of a run until this worker is stopped. Return how many units of work.

    The arguments are those of `distilled_of`.
    """
    distilled = distilled_of(
        distill, base, inputs, tokens, task=task, device=device, context=context, retry=retry
    )
    assert distilled is not None
    assert isinstance(distilled.stored, WorkerLogits)
    return {"units": distilled.stored.serve()}

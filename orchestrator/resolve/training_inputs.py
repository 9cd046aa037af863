"""What a run computes with: the workload over the vocabulary of prepared data, and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.job.spec import JobSpec
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input

if TYPE_CHECKING:
    from orchestrator.data.batches import Batches
    from orchestrator.data.tokens import Tokens
    from workloads.describe import Description
    from workloads.workload import Vocabulary, Workload


@dataclass(frozen=True)
class TrainingInputs:
    """`job` resolved over the data, the workload, and the batches of any step. Every rank makes the same."""

    job: ResolvedJob
    workload: Workload
    batches: Batches


def training_inputs(spec: JobSpec, tokens: Tokens) -> TrainingInputs:
    """What the job trains on those prepared data. Raises InputError if they hold not one sample, or do not fit."""
    from orchestrator.data import batches

    job = resolve(spec, tokens.manifest.vocabulary)
    workload = workload_of(spec, tokens, job.model)
    weights = [source.weight for source in spec.data.sources]
    return TrainingInputs(job, workload, batches.batches_of(tokens, workload.objective, spec.seed, weights))


def resolve_over(spec: JobSpec, data: str) -> tuple[ResolvedJob, str]:
    """The job resolved over the prepared data at `data`, with the digest of its token shards.

    Raises InputError if the data hold not one sample, or do not fit.
    """
    from orchestrator.data.tokens import Tokens

    tokens = Tokens.open(data)
    return training_inputs(spec, tokens).job, tokens.manifest.digest


def workload_of(spec: JobSpec, tokens: Tokens, model: Description | None = None) -> Workload:
    """The workload over the vocabulary of prepared data. Raises InputError."""
    return load_workload(spec, tokens.vocabulary(), tokens.manifest.format, model)


def load_workload(
    spec: JobSpec, vocabulary: Vocabulary, data_format: int, model: Description | None = None
) -> Workload:
    """The job's workload over a vocabulary, for prepared data of that format.

    `model` is the description that the job was resolved to, if it was. Raises InputError.
    """
    from workloads.load import load

    with wrong_input("workload"):
        return load(
            spec.workload.model,
            spec.workload.objective,
            vocabulary,
            changes=spec.workload.changes,
            options=spec.workload.options,
            mup=spec.workload.mup,
            dropout=spec.workload.dropout,
            sequence_length=spec.data.sequence_length,
            seed=spec.seed,
            rule=data_format,
            described=model,
        )

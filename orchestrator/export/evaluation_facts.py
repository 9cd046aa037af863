"""What an evaluation of an export must know, so that it gives the numbers of its commit and answers in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.config.records import TALKING
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.training_inputs import options_as_trained

if TYPE_CHECKING:
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.train.config import TrainSpec
    from workloads.workload import Workload


def evaluation_facts(
    data: DataSpec,
    job: WorkloadSpec,
    train: TrainSpec,
    seed: int,
    tokens: Tokens,
    micro_batch: int,
    trained: Workload,
) -> dict[str, Any]:
    """Return the settings of an evaluation, as export.json keeps them.

    Args:
        data: the run's data.
        job: its model and objective as the job has them.
        train: how it trained.
        seed: its seed.
        tokens: the prepared data of its sources.
        micro_batch: samples of a micro-batch in the commit's layout.
        trained: the model of the commit.
    """
    return {
        "data_format": tokens.manifest.format,
        "objective": job.objective,
        "options": options_as_trained(job, data, tokens, trained),
        "sequence_length": data.sequence_length,
        "labels": data.labels,
        "special_tokens": data.special_tokens,
        "field": data.sources[0].model_dump(mode="json")["field"],
        "global_batch": train.global_batch,
        "micro_batch": micro_batch,
        "precision": train.dtype,
        "seed": seed,
        **(_chat_facts(data, job.objective, tokens) if job.objective in TALKING else {}),
    }


def _chat_facts(data: DataSpec, objective: str, tokens: Tokens) -> dict[str, Any]:
    """Return whether the model learns from conversations, and the date for its chat template."""
    try:
        talks = chat_of(data, objective, tokens) is not None
    except InputError:  # data of an earlier version, without its template
        talks = objective == "conversation"
    day = data.chat_date
    return {"chat": talks, **({} if day is None else {"chat_date": str(day)})}

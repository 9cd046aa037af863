"""What an evaluation of an export must know, so that it gives the numbers of its commit and answers in the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.identity import CLASS_WEIGHTS
from orchestrator.config.errors import InputError
from orchestrator.config.records import TALKING
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.verified_shard import DamagedShard
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.training_inputs import weights_of_data

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.train.config import TrainSpec
    from workloads.workload import Workload


def evaluation_facts(
    data: DataSpec,
    job: WorkloadSpec,
    train: TrainSpec,
    seed: int,
    tokens: Tokens,
    commit: CommitManifest,
    trained: Workload,
) -> dict[str, Any]:
    """Return the settings of an evaluation, as export.json keeps them.

    Args:
        data: the run's data.
        job: its model and objective as the job has them.
        train: how it trained.
        seed: its seed.
        tokens: the prepared data of its sources.
        commit: the commit.
        trained: the model of the commit.
    """
    return {
        "data_format": tokens.manifest.format,
        "objective": job.objective,
        "options": _options_as_trained(data, job, tokens, commit.meta, trained),
        "sequence_length": data.sequence_length,
        "labels": data.labels,
        "special_tokens": data.special_tokens,
        "field": data.sources[0].model_dump(mode="json")["field"],
        "global_batch": train.global_batch,
        "micro_batch": commit.meta["layout"]["micro_batch"],
        "precision": train.dtype,
        "seed": seed,
        **(_chat_facts(data, job.objective, tokens) if job.objective in TALKING else {}),
    }


def _options_as_trained(
    data: DataSpec, job: WorkloadSpec, tokens: Tokens, meta: Mapping[str, Any], trained: Workload
) -> dict[str, Any]:
    """Return the options of the objective, with numbers for class weights that were counted in training.

    `balanced` stays if the numbers are lost: in a commit of an earlier version whose data is gone or damaged.
    """
    if job.options.get("class_weights") != "balanced":
        return job.options
    counted = meta.get(CLASS_WEIGHTS)
    # An excerpt, which stands for data that is gone, has other labels than the whole.
    if counted is None and tokens.folder.uri == DataFolder(meta["data"]).uri:
        with contextlib.suppress(InputError, DamagedShard, OSError):
            counted = weights_of_data(job, data, tokens, trained)
    return {**job.options, "class_weights": list(counted)} if counted else job.options


def _chat_facts(data: DataSpec, objective: str, tokens: Tokens) -> dict[str, Any]:
    """Return whether the model learns from conversations, and the date for its chat template."""
    try:
        talks = chat_of(data, objective, tokens) is not None
    except InputError:  # data of an earlier version, without its template
        talks = objective == "conversation"
    day = data.chat_date
    return {"chat": talks, **({} if day is None else {"chat_date": str(day)})}

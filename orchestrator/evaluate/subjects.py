"""The models that tasks are evaluated of: that of a commit, or of a folder in the Hugging Face format."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.evaluate.of_export import spec_of_export, workload_of_export
from orchestrator.job.errors import InputError
from orchestrator.storage.retry import patient
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workloads.workload import Workload


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a model with its weights, the tokenizer of transformers that fits it, of which step it is, and
    what `facts_of` says of the weights."""

    workload: Workload
    model: nn.Module
    tokenizer: Any
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def subject_of_commit(
    run_uri: str, step: int, device: torch.device | None = None, best: bool = False, raw: bool = False
) -> Subject:
    """The model of the commit at `step` of a run, with the tokenizer that an export of it would have.

    With `best` it is that of the commit which is best by checkpoint.keep_best, if there is one. The weights are
    averaged, if the job has an average of them, unless `raw`.

    Raises InputError if there is no such run, or its data is gone.
    """
    from orchestrator.checkpoint.averaged import facts_of, weights_of
    from orchestrator.checkpoint.identity import check_commit, read_job
    from orchestrator.checkpoint.retention import best_commit
    from orchestrator.checkpoint.store import Store
    from orchestrator.export.tokenizer import write_tokenizer
    from orchestrator.resolve.prepared_data import data_of
    from orchestrator.resolve.training_inputs import workload_of
    from workloads.load import with_weights

    run = RunDir(run_uri)
    spec = read_job(run)
    if spec is None:
        raise InputError("there is no run here", run.uri, "give a run directory")
    retry = patient(spec.limits.unsaved)
    store = Store(run.at("checkpoints"), retry=retry)
    metric = spec.checkpoint.keep_best
    found = best_commit(store, metric) if best and isinstance(metric, str) else None
    commit = store.manifest(step if found is None else found)
    check_commit(commit, spec, run.at("job.yaml"))
    tokens = data_of(run, commit.meta["data"], retry)
    workload, reader = workload_of(spec, tokens), weights_of(store, commit, spec.checkpoint, raw)
    model = with_weights(workload, lambda name: reader.read(f"model.{name}"), device)
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        write_tokenizer(tokens, workload, spec, folder)
        return Subject(workload, model, _tokenizer(folder), commit.step, facts_of(reader))


def subject_of_export(
    folder: str, overrides: Sequence[str] = (), device: torch.device | None = None
) -> Subject:
    """The model in a folder in the Hugging Face format. Raises InputError if it cannot be read."""
    from workloads.load import with_weights

    spec, step = spec_of_export(folder, {}, overrides)
    workload = workload_of_export(spec)
    model = with_weights(workload, lambda name: workload.initial(name, spec.seed), device)
    return Subject(workload, model, _tokenizer(folder), step)


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)

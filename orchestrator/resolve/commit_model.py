"""The model of a commit, with its prepared data and its weights as they are evaluated."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import check_commit, read_job
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.retention import best_commit
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.models.base import base_of_commit
from orchestrator.models.commit_weights import has_transformers_weights
from orchestrator.models.kept_config import check_read_config, kept_config
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.prepared_data import data_of
from orchestrator.resolve.prompts import speaking
from orchestrator.resolve.training_inputs import workload_of
from orchestrator.storage.retry import Retry, patient
from orchestrator.storage.run_directory import RunDir
from workloads.hf.files.hf_config import FOLDER

if TYPE_CHECKING:
    from torch import Tensor

    from orchestrator.checkpoint.reader import Reader
    from orchestrator.data.store.tokens import Tokens
    from workloads.model.scheme import Scheme
    from workloads.workload import Workload


@dataclass(frozen=True)
class CommitModel:
    """A commit of a run of the job `spec`: its prepared data, its workload, and a reader of its weights."""

    spec: JobSpec
    store: Store
    commit: CommitManifest
    tokens: Tokens
    workload: Workload
    reader: Reader

    @property
    def scheme(self) -> Scheme | None:
        """Return how the model's linear layers are quantised; None if they are in full precision."""
        return self.spec.quantize.at(self.commit.step) if self.spec.quantize else None

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model by its name. Untrained tensors are read from the run's base."""
        if name in self.workload.frozen and f"model.{name}" not in self.commit.tensors:
            return self.workload.initial(name, self.spec.seed)
        return self.reader.read(f"model.{name}")


def model_of_run(run_uri: str, step: int, best: bool = False, raw: bool = False) -> CommitModel:
    """Return the model of a run's commit, waiting for failing storage as long as the job allows.

    Args:
        run_uri: the run directory.
        step: the commit's step; None for the last.
        best: take the best commit by the metric of checkpoint.keep_best, if there is one.
        raw: do not average the weights, even if the job has an average.

    Raises InputError if the run is missing, or its data.
    """
    run = RunDir(run_uri)
    spec = read_job(run)
    if spec is None:
        raise InputError("there is no run here", run.uri, "give a run directory")
    retry = patient(spec.limits.unsaved)
    store = Store(run.commits, retry=retry)
    metric = spec.checkpoint.best_metric
    best_one = best_commit(store, metric) if best and metric is not None else None
    commit = store.manifest(step if best_one is None else best_one)
    check_commit(commit, spec.identity(), spec.own_code, spec.accept_code, run.at("job.yaml"))
    return model_of_commit(run, spec, commit, raw, retry)


def as_begun(workload: WorkloadSpec, commit: CommitManifest | None) -> WorkloadSpec:
    """Return the job's model, as transformers' class if a commit of its run has that class's weights.

    This project may have gained its own implementation of the class since.
    """
    if commit is None or workload.implementation != "auto" or not workload.model.startswith(FOLDER):
        return workload
    if not has_transformers_weights(commit):
        return workload
    return workload.model_copy(update={"implementation": "transformers"})


def check_implementation(workload: WorkloadSpec, commit: CommitManifest | None, where: str) -> None:
    """Raise InputError if the job asks for transformers' class but the commit of its run at `where` has this
    project's weights.
    """
    if (
        commit is not None
        and workload.implementation == "transformers"
        and not has_transformers_weights(commit)
    ):
        problem = "its model is this project's class, but the job file asks for transformers' class"
        raise InputError(problem, where, "set workload.implementation to auto, or start a new run")


def model_of_commit(
    run: RunDir, spec: JobSpec, commit: CommitManifest, raw: bool = False, retry: Retry | None = None
) -> CommitModel:
    """Return the model of a given commit. Raises InputError if its data is missing, or the base of weights that it
    lacks.
    """
    from orchestrator.models.averaged import weights_of

    check_implementation(spec.workload, commit, run.uri)
    spec = spec.with_parts(workload=as_begun(spec.workload, commit))
    tokens = data_of(run, commit.meta["data"], retry)
    store = Store(run.commits, retry=retry)
    reader = weights_of(store, commit, spec.checkpoint, raw)
    check_read_config(spec.workload, commit, run.uri)
    workload = workload_of(
        spec.workload,
        spec.data,
        spec.train,
        spec.seed,
        tokens,
        base=base_of_commit(spec.workload, spec.reads_base, commit),
        folder_config=kept_config(commit),
    )
    with contextlib.suppress(InputError):  # data of an earlier version, without its template
        workload = speaking(workload, chat_of(spec.data, spec.workload.objective, tokens))
    return CommitModel(spec, store, commit=commit, tokens=tokens, workload=workload, reader=reader)

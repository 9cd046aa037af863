"""Check that the weights or the commit that a run begins with exist and fit the job, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.checkpoint.identity import BASE
from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.models.base import Base, base_of
from orchestrator.models.continued import continuation_of
from orchestrator.models.continued_keys import WEIGHTS_ALONE, WHERE
from orchestrator.models.pinned_base import read_base
from orchestrator.resolve.prepared_data import format_at
from orchestrator.resolve.resolved_job import ResolvedJob, wrong_input
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest
    from workloads.workload import Workload


def check_begins(job: ResolvedJob, run_dir: RunDir, commit: CommitManifest | None = None) -> None:
    """Check what the job begins with. `commit` is the run's own newest commit, None if the run has not begun."""
    check_base(job, commit or check_continues(job, run_dir))


def check_base(job: ResolvedJob, commit: CommitManifest | None) -> None:
    """Check the weights of workload.init_from, and those of a folder that contains the model.

    - They exist and fit the model. For a run with a `commit` they are also the ones that the run began with.
    - An adapter has base weights.
    - Every token whose rows are not in the weights has rows that are trained.
    """
    spec = job.spec
    if commit is None:
        _check_read(spec.workload)
    begins_elsewhere = spec.workload.init_from or (spec.workload.model if spec.workload.shrink else "")
    if not (begins_elsewhere or spec.workload.adapter or spec.train.freeze):
        return
    from workloads.hf.files.hf_config import FOLDER
    from workloads.hf.files.weight_names import weights_of_model

    data_format = format_at(str(commit.meta.get("data", "")) if commit else "")

    if not begins_elsewhere:
        model = spec.workload.model
        if spec.workload.adapter and weights_of_model(model) is None:
            hint = "give a folder with safetensors, or set workload.init_from"
            where = f"workload.model {model.removeprefix('hf:')}"
            raise InputError("has no weights, which an adapter needs", where, hint)
        if commit is None and model.startswith(FOLDER):
            _check_tables(
                spec.workload,
                load_workload(
                    spec=spec.workload,
                    data=spec.data,
                    train=spec.train,
                    seed=spec.seed,
                    vocabulary=vocabulary_before_data(job),
                    data_format=data_format,
                    model=job.model,
                    folder_config=job.folder_config,
                ),
                model,
            )
        return
    stored_base = (commit.meta.get(BASE) if commit else None) or {}
    where = begins_elsewhere
    if commit is None or spec.needs_base:
        vocabulary = vocabulary_before_data(job)

        def read(base: Base | None) -> None:
            workload = load_workload(
                spec=spec.workload,
                data=spec.data,
                train=spec.train,
                seed=spec.seed,
                vocabulary=vocabulary,
                data_format=data_format,
                model=job.model,
                base=base,
                folder_config=job.folder_config,
            )
            if commit is None:
                _check_tables(spec.workload, workload, where)

        read_base(spec.workload, spec.needs_base, stored_base, commit is not None, read)
    else:
        base_of(spec.workload, spec.needs_base, stored_base, True)


def _check_read(workload: WorkloadSpec) -> None:
    """Check that all weight files in the folder that the job names are read."""
    from workloads.hf.files.hf_config import ADAPTER, FOLDER, root
    from workloads.hf.files.weight_names import check_none_unread

    model, base = workload.model, workload.init_from
    folder = base if base is not None else model.removeprefix(FOLDER) if model.startswith(FOLDER) else ""
    has_config = any((root(folder) / name).exists() for name in ("config.json", ADAPTER))
    if folder and is_local(folder) and has_config:
        with wrong_input("workload.init_from" if base is not None else "workload.model"):
            check_none_unread(str(root(folder)))


def _check_tables(spec: WorkloadSpec, workload: Workload, where: str) -> None:
    if table_shapes := workload.begun_tables:
        check_rows(spec, workload, table_shapes, where)


def check_rows(
    spec: WorkloadSpec, workload: Workload, shapes: Mapping[str, Sequence[int]], where: str
) -> None:
    """Raise InputError if a frozen table has rows for tokens that the weights do not have.

    Args:
        spec: the job's part of the model.
        workload: the model.
        shapes: the shapes of the tables in the weights, by name.
        where: names the weights in messages.
    """
    for name in sorted(workload.tables & workload.frozen - workload.thawed_after.keys()):
        rows = workload.shapes[name][0]
        have = shapes[name][0] if name in shapes else rows
        if have < rows:
            problem = f"{where} has no rows for tokens {have} to {rows - 1}, and {name} is not trained"
            key = "workload.adapter" if spec.adapter else "train.freeze"
            raise InputError(problem, key, "train a base that has them first, with all of its weights")


def check_continues(job: ResolvedJob, run_dir: RunDir) -> CommitManifest | None:
    """Check the commit of another run that the job continues from, and return it; None if the job names none.

    Raises InputError if it does not exist, or if its weights do not fit the job's model.
    """
    source = continuation_of(job.spec).source(run_dir)
    if source is None:
        return None
    from orchestrator.data.store.manifest import FORMAT
    from orchestrator.train.engines.state import committed_shapes
    from workloads.adapters.frozen import after

    if not isinstance(job.spec.data.tokenizer, TrainedTokenizer):  # whose vocabulary is not known yet
        step = source.commit.step
        workload = load_workload(
            spec=job.spec.workload,
            data=job.spec.data,
            train=job.spec.train,
            seed=job.spec.seed,
            vocabulary=vocabulary_before_data(job),
            data_format=FORMAT,
            model=job.model,
            folder_config=job.folder_config,
        )
        thawing = [name for name, at in workload.thawed_after.items() if at == step]
        try:
            source.commit.check_shapes(committed_shapes(after(workload, step), thawing))
        except InputError as error:
            raise InputError(f"{source}: {error.what}", WHERE, WEIGHTS_ALONE) from None
    return source.commit

"""Check a job that other machines will run, as far as this machine can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import extension_of
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.own_code import cleaning_functions
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.config import TrainBpe
from orchestrator.launch.begun_job import BegunJob, in_its_run
from orchestrator.launch.component_checks import ComponentChecks
from orchestrator.launch.finished import PastRun
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.job_checks import check_job, check_layouts, check_objective_of, check_workload
from orchestrator.launch.job_needs import needed_libraries
from orchestrator.launch.job_paths import checked_paths, is_here, text_paths
from orchestrator.launch.machine_checks import check_memory
from orchestrator.launch.path_checks import check_uris
from orchestrator.launch.preflight import check_until
from orchestrator.launch.worker import worker_named
from orchestrator.planner.choose_precision import MachineOf
from orchestrator.planner.device import BOUNDLESS
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local
from workloads.errors import WorkloadError
from workloads.own.object_reference import CannotImport, load, root_of


def check_on_paper(spec: JobSpec) -> tuple[ResolvedJob, list[str]]:
    """Return the resolved job, and a line for each assumption about it.

    Raises InputError for everything that would be wrong on any machine except the text, and for an unknown vocabulary.
    """
    problems = Problems()
    assumed: list[str] = []
    for check in ComponentChecks(spec).without_text():
        with problems.noted():
            check()
    with problems.noted():
        data, assumed = with_vocabulary(spec.data, spec.workload)
        spec = spec.with_parts(data=data)
        job = resolve(spec)
        with problems.noted():
            check_objective_of(job)
            if not problems:
                check_workload(job)
    problems.raise_noted()
    return job, assumed


def check_submitted(spec: JobSpec, run: RunDir, until: int | None) -> None:
    """Check a job that a cluster will run, by those checks of its run that do not depend on the machine. Starts and
    writes nothing.

    No store is asked. Files, code and libraries that this machine lacks are left to the run, because the cluster may
    have them. A path that exists here counts as the cluster's.

    Args:
        spec: the job.
        run: its run directory.
        until: the step at which it is to stop; None for none.

    Raises:
        InputError: with all problems.
    """
    problems = Problems()
    is_complete = has_parts(spec)
    has_run = run.local and not run.is_gone()
    begun = BegunJob(spec, begins=not has_run)
    if has_run:
        with problems.noted():
            run.check_ours()
            if not is_complete or not is_local(data_cache(spec.data, run)):
                extension_of(spec.identity(), run, Store(run.commits).latest(deep=False))
            elif PastRun(spec, run).done():
                return  # nothing is left to do, whatever the job names
            else:
                begun = in_its_run(spec, run)
    with problems.noted():
        check_until(until, spec.train)
    machine_of = worker_named(spec.resources)
    job: ResolvedJob | None = None
    with problems.noted():
        if is_complete:
            check_uris(spec.data, spec.checkpoint.export_to, spec.every_source, run)
            job = _checked(begun, machine_of or (lambda *_: BOUNDLESS))
            if not problems:
                check_begins(job, run, begun.commit)
        else:
            with contextlib.suppress(InputError):
                job = resolve(spec)
    problems.raise_noted()
    if job is not None and machine_of is not None and spec.resources.must_fit:
        job = in_chosen_precision(job, machine_of)
        # The run itself checks rollout workers: only it knows whether it has a commit, and must go on.
        check_memory(job, machine_of(job.spec.resources, job.spec.train.dtype), resumes=True)


def _checked(begun: BegunJob, machine_of: MachineOf) -> ResolvedJob:
    """Check a job of which this machine lacks the text at most, and return it, resolved."""
    spec = begun.spec
    if all(map(is_here, text_paths(spec))):
        return check_job(
            spec,
            begun.prepared,
            machine_of=machine_of,
            folder_config=begun.folder_config,
            begins=begun.begins,
        )
    job = in_chosen_precision(check_on_paper(spec)[0], machine_of)
    check_layouts(job)
    return job


def has_all(spec: JobSpec, made: tuple[str, ...] = ()) -> bool:
    """Return whether this machine has all that the checks of a job read, import or call.

    Args:
        spec: the job.
        made: folders that need not be here, because others make them first.
    """
    return has_parts(spec, made) and all(map(is_here, text_paths(spec)))


def has_parts(spec: JobSpec, made: tuple[str, ...] = ()) -> bool:
    """As `has_all`, except for the text."""
    return (
        all(path.startswith(made) or is_here(path) for path in checked_paths(spec))
        and all(need.finding.verdict == "ok" for need in needed_libraries(spec))
        and all(map(_is_importable, (*spec.own_code, *cleaning_functions(spec.data.clean))))
    )


def _is_importable(reference: str) -> bool:
    """Return whether the module of a `module:name` is here and can be imported. It may lack the name."""
    try:
        root_of(reference)
    except WorkloadError:
        return False
    with contextlib.suppress(WorkloadError):
        try:
            load(reference)
        except CannotImport:
            return False
    return True


def with_vocabulary(
    data: DataSpec, workload: WorkloadSpec, is_there: Callable[[str], bool] | None = None
) -> tuple[DataSpec, list[str]]:
    """Replace a tokenizer that does not exist here by one with as many tokens as the model has.

    Args:
        data: the data, which names the tokenizer.
        workload: the model.
        is_there: returns whether a tokenizer exists, by default as the run looks for it.

    Returns:
        The data, and a line if the tokenizer was replaced.

    Raises:
        InputError: the size of the vocabulary does not follow from the model either.
    """
    from orchestrator.data.encoding import tokenizer
    from workloads.describe import describe
    from workloads.own.object_reference import is_object_reference

    named = data.tokenizer
    if data.samples is not None or not isinstance(named, str) or (is_there or tokenizer.is_there)(named):
        return data, []
    if is_object_reference(workload.model):  # its vocabulary is as large as the tokenizer
        hint = "write data.tokenizer: {train_bpe: N} with the size of its vocabulary"
        raise InputError(
            "is not here, but it determines the size of an own model", f"data.tokenizer {named}", hint
        )
    with wrong_input("workload.model"):
        size = describe(workload.model, workload.changes, implementation=workload.implementation).vocab_size
    size += len(data.add_tokens)
    data = data.model_copy(update={"tokenizer": TrainBpe(train_bpe=max(size, 300)), "add_tokens": []})
    line = f"the tokenizer {named} is not here, and taken to have the {size:,} tokens of {workload.model}"
    return data, [line]

"""The checks of a job, independent of its run and of where it runs: a loop over what its components check.

A component's check is in the component's package and gets its part of the job. Here are the lists, in the order in
which problems are shown. Every check raises InputError with the key of the job file that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.config.commit_steps import check_best
from orchestrator.config.errors import Problems
from orchestrator.config.own_code import code_of
from orchestrator.config.spec import JobSpec
from orchestrator.data.clean.check import check_cleaning
from orchestrator.data.prepare.record_kind import check_records
from orchestrator.data.sources.check import check_sources
from orchestrator.evaluate.check import check_tasks
from orchestrator.export.check import check_export, check_export_target
from orchestrator.launch.trial import check_trial
from orchestrator.launch.worker import worker_here
from orchestrator.optim.check import check_groups, check_own_update
from orchestrator.planner import prices
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import BOUNDLESS
from orchestrator.planner.no_layout import too_narrow
from orchestrator.planner.own_cost import check_own_cost
from orchestrator.planner.precision import MachineOf
from orchestrator.prune.check import check_prune
from orchestrator.quantize.check import check_quantize
from orchestrator.resolve.objective_check import check_objective
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.prepared_data import format_at
from orchestrator.resolve.prompts import check_generates
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input
from orchestrator.resolve.teacher import check_teacher
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
from orchestrator.train.reference_check import check_preferences
from orchestrator.train.rollouts.reward_check import check_reward_models
from workloads.hf.files.hf_config import FolderConfig
from workloads.own.object_reference import is_object_reference

Check = Callable[[], object]
"""A check of a component with its arguments bound. It raises InputError, and its result means nothing."""


def check_job(
    spec: JobSpec,
    prepared: str = "",
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
    machine_of: MachineOf = worker_here,
    *,
    kept: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob:
    """Check a job independently of where it runs. Return the resolved job, with a precision for its workers if it names
    none.

    Args:
        spec: the job.
        prepared: the folder of the run's data, if the run has begun.
        begin: called before the model is loaded, unless a problem was found.
        is_known: whether the job was checked before; its model is then not loaded, see `checked_before`.
        machine_of: returns a worker of the job.
        kept: the run's copy of the configuration of its pretrained folder.
        begins: see `check_sources`.
    """
    problems = Problems()
    if job := _check_before_loading(spec, problems, machine_of, kept, begins):
        if not problems:
            begin()
        if not is_known:
            with problems.noted():
                check_objective_of(job)
                if not problems:
                    check_workload(job, prepared)
                    check_generates(job)
    problems.raise_noted()
    assert job is not None
    return job


def check_preparable(spec: JobSpec) -> None:
    """Check a job for data preparation: everything in `check_job` except loading its model.

    For little text, loading the model would take longer than the preparation.
    """
    problems = Problems()
    _check_before_loading(spec, problems, lambda *_: BOUNDLESS, begins=True)
    problems.raise_noted()


def _check_before_loading(
    spec: JobSpec,
    problems: Problems,
    machine_of: MachineOf,
    kept: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob | None:
    """Return the resolved job, None if it cannot be resolved. Adds to `problems`. Imports no torch."""
    with problems.noted():
        check_sources(spec.data, spec.workload.objective, spec.set_sources, begins)
    checks: list[Check] = [
        *checks_without_text(spec),
        partial(check_best, spec.checkpoint, spec.train, spec.evaluate),
        partial(check_export_target, spec.checkpoint.export_to),
        partial(check_reward_models, spec.rewards),
    ]
    for check in checks:
        with problems.noted():
            check()
    with problems.noted():
        job = in_chosen_precision(resolve(spec, kept=kept), machine_of)
        with problems.noted():
            check_layouts(job)
        return job
    return None


def checks_without_text(spec: JobSpec) -> list[Check]:
    """Return the checks of components that read neither the text nor the model, in the order of their problems."""
    return [
        partial(check_records, spec.data, spec.workload.objective, spec.every_source),
        partial(check_preferences, spec.workload, spec.train, spec.data.shuffle),
        partial(check_cleaning, spec.data, spec.workload.objective, spec.workload.adapter is not None),
        partial(prices.check, spec.limits, spec.tune),
    ]


def checks_of_workload(spec: JobSpec, workload: Any, prepared: str = "") -> list[Check]:
    """Return the checks of components that look at the model. The first problem ends them, because each relies on those
    before.

    Args:
        spec: the job.
        workload: its model and objective.
        prepared: the folder of the run's data, if the run has begun.
    """
    return [
        partial(check_groups, spec.train.optimizer, workload),
        partial(check_prune, spec.prune, workload),
        partial(check_quantize, spec.quantize, workload),
        partial(check_export, spec.checkpoint, workload, spec.quantize),
        partial(check_tasks, spec.evaluate, spec.set_names, workload),
        partial(code_of, spec.own_code),
        partial(check_own_cost, spec.parallel, spec.resources.workers.max),
        partial(check_own_update, spec.train.optimizer, spec.train.warmup_steps, spec.train.steps),
        partial(check_trial, spec, workload, prepared),
    ]


def check_named(spec: JobSpec) -> None:
    """Check that the text and the model that a job names exist. Also works for a job with other wrong keys."""
    from workloads.describe import describe

    problems = Problems()
    with problems.noted():
        check_sources(spec.data, spec.workload.objective, spec.set_sources)
    if not is_object_reference(spec.workload.model):
        with problems.noted(), wrong_input("workload.model"):
            describe(spec.workload.model)
    problems.raise_noted()


def check_workload(job: ResolvedJob, prepared: str = "") -> None:
    """Check that model, objective, options, sequence length and tokenizer fit each other, by `checks_of_workload`.

    Word starts and sentence ends are not checked, because they depend on the text.
    """
    known = vocabulary_before_data(job)
    workload = load_workload(
        asked=job.spec.workload,
        data=job.spec.data,
        train=job.spec.train,
        seed=job.spec.seed,
        vocabulary=known,
        data_format=format_at(prepared),
        model=job.model,
        kept=job.kept,
    )
    if job.spec.distill:
        check_teacher(job.spec.distill, job.spec.workload, job.spec.data, job.spec.train, workload)
    for check in checks_of_workload(job.spec, workload, prepared):
        check()


def check_objective_of(job: ResolvedJob) -> None:
    """Check the objective of a resolved job, see `check_objective`."""
    asked = job.spec.workload
    check_objective(asked.objective, asked.model, job.model.architecture, job.spec.every_source)


def check_layouts(job: ResolvedJob) -> None:
    """Check that a legal layout exists for the job's workers, on any machine."""
    workers = job.spec.resources.workers
    best = plan(demand_of(job.spec), job.shape, workers.max, BOUNDLESS).chosen.layout
    if best.world < workers.min:
        raise too_narrow(job.spec.resources, best)

"""The checks of a job, independent of its run and of where it runs: a loop over what its components check.

The lists are in `component_checks`. Every check raises InputError with the key of the job file that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config.errors import Problems
from orchestrator.config.spec import JobSpec
from orchestrator.data.sources.check import check_sources
from orchestrator.launch.component_checks import ComponentChecks
from orchestrator.launch.worker import local_worker
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.choose_precision import MachineOf
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import BOUNDLESS
from orchestrator.planner.no_layout import too_narrow
from orchestrator.resolve.objective_check import check_objective
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.prepared_data import format_at
from orchestrator.resolve.prompts import check_generates
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input
from orchestrator.resolve.teacher import check_teacher
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
from workloads.hf.files.hf_config import FolderConfig
from workloads.own.object_reference import is_object_reference


def check_job(
    spec: JobSpec,
    prepared: str = "",
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
    machine_of: MachineOf = local_worker,
    *,
    folder_config: FolderConfig | None = None,
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
        folder_config: the run's copy of the configuration of its pretrained folder.
        begins: see `check_sources`.
    """
    problems = Problems()
    checks = JobChecks(spec)
    if job := checks.before_loading(problems, machine_of, folder_config, begins):
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


class JobChecks:
    """Runs the checks of a job that need no model."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job

    def before_loading(
        self,
        problems: Problems,
        machine_of: MachineOf,
        folder_config: FolderConfig | None = None,
        begins: bool = False,
    ) -> ResolvedJob | None:
        """Return the resolved job, None if it cannot be resolved. Imports no torch.

        Args:
            problems: gets the problems.
            machine_of, folder_config, begins: as in `check_job`.
        """
        job = self._job
        for check in ComponentChecks(job).before_loading(begins):
            with problems.noted():
                check()
        with problems.noted():
            resolved = in_chosen_precision(resolve(job, folder_config=folder_config), machine_of)
            with problems.noted():
                check_layouts(resolved)
            return resolved
        return None

    def without_model(self) -> None:
        """Check everything in `check_job` except what loads the model, before data is prepared.

        For little text, loading the model would take longer than the preparation.
        """
        problems = Problems()
        self.before_loading(problems, lambda *_: BOUNDLESS, begins=True)
        problems.raise_noted()


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
    """Check that model, objective, options, sequence length and tokenizer fit, by `ComponentChecks.model_checks`.

    Word starts and sentence ends are not checked, because they depend on the text.
    """
    vocabulary = vocabulary_before_data(job)
    workload = load_workload(
        spec=job.spec.workload,
        data=job.spec.data,
        train=job.spec.train,
        seed=job.spec.seed,
        vocabulary=vocabulary,
        data_format=format_at(prepared),
        model=job.model,
        folder_config=job.folder_config,
    )
    if job.spec.distill:
        check_teacher(job.spec.distill, job.spec.workload, job.spec.data, job.spec.train, workload)
    for check in ComponentChecks(job.spec).model_checks(workload, prepared):
        check()


def check_objective_of(job: ResolvedJob) -> None:
    """Check the objective of a resolved job, see `check_objective`."""
    workload = job.spec.workload
    check_objective(workload.objective, workload.model, job.model.architecture, job.spec.every_source)


def check_layouts(job: ResolvedJob) -> None:
    """Check that a legal layout exists for the job's workers, on any machine."""
    workers = job.spec.resources.workers
    best = plan(demand_of(job.spec), job.shape, workers.max, BOUNDLESS).chosen.layout
    if best.world < workers.min:
        raise too_narrow(job.spec.resources, best)

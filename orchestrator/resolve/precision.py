"""A job in the precision that it trains in: whoever plans or begins a run asks here once, before anything else sees a
job that leaves its precision to the planner (`train.precision: auto`)."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from orchestrator.checkpoint.identity import job_begun
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.planner.precision import Choice, MachineOf, chosen, in_precision
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import PRECISION, RunDir


def as_its_run(spec: JobSpec, run: RunDir) -> JobSpec:
    """The job in the precision that its run, or its search, has begun with; as it is if that has not begun, or the job
    names one. Raises InputError if the job in the directory is damaged."""
    if spec.train.precision != "auto":
        return spec
    before = job_begun(run)
    if before is None or before.train.precision == "auto":  # a file of the user's own that has not run yet
        return spec
    return in_precision(spec, before.train.precision)


def in_chosen_precision(job: ResolvedJob, machine_of: MachineOf) -> ResolvedJob:
    """The job in the precision that is chosen for such workers, if it leaves that open. Raises InputError if it has a
    plan in none."""
    if job.spec.train.precision != "auto":
        return job
    found = chosen(job.spec, job.shape, machine_of)
    return replace(job, spec=in_precision(job.spec, found.precision), precision=found)


def choice_of(asked: JobSpec, job: ResolvedJob) -> Choice | None:
    """Why `job`, which was `asked` for, has its precision; None if it was named."""
    if asked.train.precision != "auto":
        return None
    return job.precision or Choice(job.spec.train.dtype)


def record_choice(job: ResolvedJob, run: RunDir) -> None:
    """Write down why a run that has just begun has its precision, if that was chosen. A store that takes no writes now
    stops no run: its rows say more about that."""
    if job.precision is not None:
        with contextlib.suppress(OSError, InputError):
            run.write_json(PRECISION, job.precision.to_json())

"""The precision that a job trains in. Code that plans or begins a run asks here once, before any other code sees a
job with `train.precision: auto`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from orchestrator.checkpoint.identity import job_begun
from orchestrator.config.errors import InputError
from orchestrator.planner.choose_precision import Choice, MachineOf, choose_precision, in_precision
from orchestrator.planner.demand import Demand, demand_of
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import PRECISION, RunDir
from orchestrator.train.config import Precision, TrainSpec


def as_its_run(train: TrainSpec, run: RunDir) -> TrainSpec:
    """Return how the job trains, with the precision that its run, or its search, began with.

    Unchanged if the run has not begun, or if the job names a precision. Raises InputError if the job in the directory
    is damaged.
    """
    if train.precision != "auto":
        return train
    before = job_begun(run)
    if before is None or before.train.precision == "auto":  # the user's own job.yaml, which has not run yet
        return train
    return in_precision(train, before.train.precision)


def in_chosen_precision(job: ResolvedJob, machine_of: MachineOf) -> ResolvedJob:
    """Return the job with the precision that is chosen for such workers, if it leaves that open.

    Raises InputError if no precision has a plan.
    """
    if job.spec.train.precision != "auto":
        return job

    def demand_in(precision: Precision) -> Demand:
        return demand_of(job.spec.with_parts(train=in_precision(job.spec.train, precision)))

    choice = choose_precision(demand_in, job.shape, machine_of)
    train = in_precision(job.spec.train, choice.precision)
    return replace(job, spec=job.spec.with_parts(train=train), precision=choice)


def choice_of(train: TrainSpec, job: ResolvedJob) -> Choice | None:
    """Return why `job` has its precision, given `train` as the user wrote it; None if the precision was named."""
    if train.precision != "auto":
        return None
    return job.precision or Choice(job.spec.train.dtype)


def record_choice(job: ResolvedJob, run: RunDir) -> None:
    """Store why a new run's precision was chosen, if it was chosen. Storage errors are ignored."""
    if job.precision is not None:
        with contextlib.suppress(OSError, InputError):
            run.write_json(PRECISION, job.precision.to_json())

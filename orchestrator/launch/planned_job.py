"""The plan that a user asks for, with all that is checked of its job before: on this machine, or on one that is not
here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.machine_checks import check_room
from orchestrator.launch.offline_checks import check_on_paper
from orchestrator.launch.path_checks import check_places, check_written
from orchestrator.launch.preflight import check_here, preflight
from orchestrator.launch.worker import worker_here
from orchestrator.parallel.layout import Layout
from orchestrator.planner.device import Machine
from orchestrator.planner.feed import feed
from orchestrator.planner.machines import on_paper, worker_on_paper
from orchestrator.planner.plan import Plan, Verdict
from orchestrator.planner.planner import on_workers
from orchestrator.planner.precision import Choice
from orchestrator.planner.trace.layout_memory import TracedMemory, confirmed
from orchestrator.resolve.precision import as_its_run, choice_of, in_chosen_precision
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import RunDir


@dataclass(frozen=True)
class PlannedJob:
    """A job with its plan.

    Attributes:
        job: resolved, in the precision that is chosen.
        machine: a worker.
        must_fit: whether a layout is an error that does not fit.
        plan: the plan.
        traced: memory of the chosen layout by its trace.
        choice: why the precision is what it is, of a job that leaves it open.
        verdicts: what traces said of layouts, see `confirmed`.
        assumed: what is taken of what is not here, a line each.
        refused: why `run` would refuse the job in the run directory of its name, empty where it would not.
    """

    job: ResolvedJob
    machine: Machine
    must_fit: bool
    plan: Plan
    traced: TracedMemory
    choice: Choice | None
    verdicts: Mapping[Layout, Verdict] = dataclasses.field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    refused: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether it trains on processors."""
        return not self.job.spec.resources.per_worker.gpu

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        more: dict[str, Any] = {"assumed": list(self.assumed)} if self.assumed else {}
        more |= {"streaming": fed.to_json()} if (fed := feed(self.job.spec, self.plan)) else {}
        more |= {"precision": self.choice.to_json()} if self.choice else {}
        return self.traced.told(self.plan, self.on_cpu) | more


def with_workers(spec: JobSpec, workers: int) -> JobSpec:
    """The job with at most so many workers, as many as it wants at least if there are so many."""
    return on_workers(spec, min(spec.resources.workers.min, workers), workers)


def planned_on_paper(spec: JobSpec, device: str) -> PlannedJob:
    """The plan for workers of such a device, as `a100-80`, or as a profile's file. A layout given by hand is predicted
    though it may not fit. Raises InputError."""
    job, assumed = check_on_paper(on_paper(spec, device))
    job = in_chosen_precision(job, partial(worker_on_paper, device=device))
    found = _planned(spec, job, worker_on_paper(job.spec, device), job.spec.searches_layout)
    return dataclasses.replace(found, assumed=tuple(assumed))


def planned_here(spec: JobSpec, run: RunDir | None) -> PlannedJob:
    """The plan for a run on this machine; with a `run` directory all that `run` checks is. Raises InputError."""
    asked = spec
    if run is not None:
        check_places(spec, run)
        check_written(spec, run, None)
        spec = as_its_run(spec, run)
    found = planned_of(asked, check_here(spec, None))
    return dataclasses.replace(found, refused=_refused(found.job, run)) if run is not None else found


def planned_of(asked: JobSpec, job: ResolvedJob, machine: Machine | None = None) -> PlannedJob:
    """The plan of a job that is checked, which was `asked` for, for such workers, or for those of this machine.
    Raises InputError."""
    return _planned(asked, job, machine or worker_here(job.spec), True)


def _planned(asked: JobSpec, job: ResolvedJob, machine: Machine, must_fit: bool) -> PlannedJob:
    sure = confirmed(job, job.spec.resources.workers.max, machine, must_fit, always=True)
    assert sure.traced is not None
    return PlannedJob(job, machine, must_fit, sure.plan, sure.traced, choice_of(asked, job), sure.verdicts)


def _refused(job: ResolvedJob, run: RunDir) -> str:
    """What `run` would refuse beside the job itself. A run of its name that has begun is another matter: the plan may
    be for another directory, so that what does not fit that run is only told. Raises InputError."""
    if not run.exists("job.yaml"):
        check_begins(job, run)
        check_room(job, run, None)
        return ""
    try:
        preflight(job.spec, run, None, None)
    except InputError as error:
        return str(error)
    return ""

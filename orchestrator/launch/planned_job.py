"""Check a job and plan it, for this machine or for another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.machine_checks import check_room
from orchestrator.launch.offline_checks import check_on_paper
from orchestrator.launch.path_checks import check_all_uris, check_written
from orchestrator.launch.preflight import check_on_machine, preflight
from orchestrator.launch.worker import local_worker
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import Plan, Verdict
from orchestrator.planner.choose_precision import Choice
from orchestrator.planner.device import Machine
from orchestrator.planner.feed import feed
from orchestrator.planner.machines import resources_on_device, worker_on_device
from orchestrator.planner.splits import RolloutPlan, plan_rollouts
from orchestrator.planner.trace.layout_memory import TracedMemory, plan_with_traces
from orchestrator.resolve.precision import as_its_run, choice_of, in_chosen_precision
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.config import TrainSpec

if TYPE_CHECKING:
    from orchestrator.planner.teacher_workers import TeacherPlan


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A job with its plan.

    Attributes:
        job: the resolved job, in the chosen precision.
        machine: one worker.
        must_fit: whether a layout that does not fit is an error.
        plan: the plan.
        traced: the memory of the chosen layout by its trace.
        choice: why the precision was chosen; None for a job that names it.
        verdicts: the results of traces of layouts, see `plan_with_traces`.
        assumed: a line for each assumption about things that do not exist here.
        refused: why `run` would refuse the job in its run directory, empty if it would not.
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
        """Whether the job trains on CPUs."""
        return not self.job.spec.resources.per_worker.gpu

    @cached_property
    def rollouts(self) -> RolloutPlan | None:
        """The prediction of the rollouts, with the fastest split of the workers; None without rollouts."""
        from orchestrator.planner.demand import demand_of

        return plan_rollouts(demand_of(self.job.spec), self.job.shape, self.plan, self.verdicts)

    @cached_property
    def teachers(self) -> TeacherPlan | None:
        """The prediction of the teacher workers; None without any."""
        from orchestrator.planner.demand import demand_of
        from orchestrator.planner.teacher_workers import plan_teacher_workers

        return plan_teacher_workers(demand_of(self.job.spec), self.job.shape, self.plan)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step, with its share of a rollout, or while its logits are computed."""
        if self.teachers:
            return self.teachers.step_seconds
        return self.rollouts.requested.time.seconds if self.rollouts else self.plan.chosen.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        more: dict[str, Any] = {"assumed": list(self.assumed)} if self.assumed else {}
        if notes := self.job.notes:
            more["notes"] = notes
        if fed := feed(self.job.spec.data, self.job.spec.resources.per_worker, self.plan):
            more["streaming"] = fed.to_json()
        document = self.traced.plan_json(self.plan, self.on_cpu)
        if rollouts := self.rollouts:
            more["rollout"] = rollouts.to_json()
            document["predicted"] |= rollouts.with_rollout_time(self.plan)
        if teachers := self.teachers:
            more["teacher"] = teachers.to_json()
        if self.choice:
            more["precision"] = self.choice.to_json()
        return document | more


def planned_on_paper(spec: JobSpec, device: str, trace: bool = True, run: RunDir | None = None) -> PlannedJob:
    """Plan a job for workers with another device. A layout that the job pins is predicted even if it does not fit.

    Args:
        spec: the job.
        device: the name of a device, such as `a100-80`, or the file of a profile.
        trace: whether the chosen layout's memory is traced; otherwise the closed formula gives it.
        run: its directory, beside which its data may be prepared already.

    Raises:
        InputError: the job is wrong, or the device is unknown.
    """
    from orchestrator.resolve.training_inputs import prepared_rows
    from orchestrator.storage.uri import is_local

    job, assumed = check_on_paper(spec.with_parts(resources=resources_on_device(spec.resources, device)))
    job = in_chosen_precision(job, partial(worker_on_device, device=device))
    if run is not None and all(is_local(uri) for source in spec.data.sources for uri in source.uris):
        job = job.with_rows(prepared_rows(job.spec, run, job.folder_config))
    chosen_plan = _planned(
        spec.train,
        job,
        worker_on_device(job.spec.resources, job.spec.train.dtype, device),
        job.spec.searches_layout,
        trace,
    )
    return dataclasses.replace(chosen_plan, assumed=(*assumed, *chosen_plan.assumed))


def planned_locally(
    spec: JobSpec, run: RunDir | None, trace: bool = True, begin: Callable[[str], None] = lambda _: None
) -> PlannedJob:
    """Plan a run on this machine.

    Args:
        spec: the job.
        run: its directory. Then everything is checked that the command `run` checks.
        trace: whether the chosen layout's memory is traced; otherwise the closed formula gives it.
        begin: called with the name of each stage of the work when it begins.

    Raises InputError.
    """
    from orchestrator.resolve.training_inputs import prepared_rows

    begin("reading the data and the model's configuration")
    requested = spec
    if run is not None:
        check_all_uris(spec, run)
        check_written(spec.checkpoint, spec.data, run, None)
        spec = spec.with_parts(train=as_its_run(spec.train, run))
    job = check_on_machine(
        spec, None, begin=partial(begin, "checking the model, the objective and the tokenizer")
    )
    if run is not None:
        job = job.with_rows(prepared_rows(job.spec, run, job.folder_config))
    begin("tracing the memory of layouts" if trace else "comparing layouts")
    chosen_plan = planned_of(requested.train, job, trace=trace)
    begin("comparing the job with its run directory")
    return (
        dataclasses.replace(chosen_plan, refused=_refused(chosen_plan.job, run))
        if run is not None
        else chosen_plan
    )


def planned_of(
    train: TrainSpec, job: ResolvedJob, machine: Machine | None = None, trace: bool = True
) -> PlannedJob:
    """Plan a job that is checked already.

    Args:
        train: how to train, as the user wrote it.
        job: the job, resolved.
        machine: one worker, by default of this machine.
        trace: whether the chosen layout's memory is traced; otherwise the closed formula gives it.

    Raises:
        InputError: no layout is legal, or none fits.
    """
    machine = machine or local_worker(job.spec.shared_resources, job.spec.train.dtype)
    return _planned(train, job, machine, True, trace)


def with_trace(by_formula: PlannedJob) -> PlannedJob:
    """Trace the memory of a job that was planned without a trace. Raises InputError if no layout fits."""
    job = by_formula.job
    sure = plan_with_traces(
        job,
        job.spec.resources.workers.max,
        by_formula.machine,
        by_formula.must_fit,
        always=True,
        by_formula=by_formula.plan,
    )
    assert sure.traced is not None
    return dataclasses.replace(by_formula, plan=sure.plan, traced=sure.traced, verdicts=sure.verdicts)


def _planned(train: TrainSpec, job: ResolvedJob, machine: Machine, must_fit: bool, trace: bool) -> PlannedJob:
    workers = job.spec.resources.workers.max
    sure = plan_with_traces(job, workers, machine, must_fit, always=True, trace=trace)
    assert sure.traced is not None
    return PlannedJob(
        job,
        machine,
        must_fit=must_fit,
        plan=sure.plan,
        traced=sure.traced,
        choice=choice_of(train, job),
        verdicts=sure.verdicts,
        assumed=_assumed_rows(job.shape) if job.spec.has_varied_rows else (),
    )


def _assumed_rows(shape: ModelShape) -> tuple[str, ...]:
    """Return a line if rows may be shorter than planned, because the lengths of the samples are not known yet."""
    if shape.row_tokens:
        return ()
    length = shape.sequence_length
    return (f"every row has {length} tokens: the data is not prepared yet, and shorter rows take less time",)


def _refused(job: ResolvedJob, run: RunDir) -> str:
    """Return why `run` would refuse the job in a directory whose run has begun; empty if it would not.

    The plan may be meant for another directory, so a conflict with that run is reported but is no error. Without a run
    in the directory, a problem raises InputError.
    """
    if not run.exists("job.yaml"):
        check_begins(job, run)
        check_room(job, run, None)
        return ""
    try:
        preflight(job.spec, run, None, None)
    except InputError as error:
        return str(error)
    return ""

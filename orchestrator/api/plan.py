"""The plan of a job as a value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api.job import Job
from orchestrator.api.place import run_directory
from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import Layout

if TYPE_CHECKING:
    from orchestrator.planner.search import Candidate


@dataclass(frozen=True)
class PlannedLayout:
    """A legal layout with its prediction.

    Attributes:
        layout: the layout; its text is that of the job file's `parallel`, such as "dp2 zero1 mb4".
        step_seconds: predicted seconds of a step.
        memory_bytes: predicted bytes of the tensors of the worker that needs most.
    """

    layout: Layout
    step_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class JobPlan:
    """The planner's predictions for a job, as `orchestrator plan` shows them.

    Attributes:
        layout: the chosen layout.
        workers: how many workers it uses.
        step_seconds: predicted seconds of a step.
        tokens_per_step: tokens, or what else the objective reads, in a step.
        memory_bytes: predicted bytes of the worker that needs most, with its process.
        fits: whether the workers have that memory.
        device: the name of the device that is planned for, "this machine" for the present one.
        layouts: the best legal layouts, the fastest first.
        rejected: the layouts that are out, each with the reason.
        assumed: a line for each assumption about things that do not exist here.
        refused: why `run` would refuse the job in its run directory; empty if it would not.
    """

    layout: Layout
    workers: int
    step_seconds: float
    tokens_per_step: int
    memory_bytes: int
    fits: bool
    device: str
    layouts: tuple[PlannedLayout, ...]
    rejected: tuple[tuple[Layout, str], ...]
    assumed: tuple[str, ...]
    refused: str

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second."""
        return self.tokens_per_step / self.step_seconds

    def __repr__(self) -> str:
        """Return the chosen layout and its prediction as one line, as a notebook shows it."""
        return (
            f"JobPlan({self.layout}, {self.step_seconds:.3g} s a step, {self.memory_bytes / 2**20:.0f} MiB a worker"
            f"{'' if self.fits else ', does not fit'})"
        )


def plan(
    job: Job,
    run_dir: str | Path | None = None,
    *,
    workers: int | None = None,
    machine: str | None = None,
    trace: bool = True,
) -> JobPlan:
    """Check a job, choose its layout, and predict time and memory. Starts and writes nothing.

    Args:
        job: the job.
        run_dir: the run directory, by default runs/<name>.
        workers: the number of workers, by default resources.workers.max.
        machine: a device that need not be here, such as "a100-80", or a profile file; by default this machine.
        trace: whether to trace the memory of the chosen layout, which takes seconds of a CPU; a closed formula gives it
            otherwise. A process traces layouts of the same shape once.

    Raises InputError if the job is wrong, no layout is legal, or none fits.
    """
    from orchestrator.launch.planned_job import planned_locally, planned_on_paper
    from orchestrator.planner.planner import with_workers

    if not isinstance(job, Job):
        raise InputError(
            f"must be a Job, not {type(job).__name__}", "job", "give Job(...), or Job.load(FILE)"
        )
    if workers is not None and (type(workers) is not int or workers < 1):
        raise InputError(f"must be an integer of at least 1, or None (got {workers!r})", "workers")
    spec = job.spec
    if workers is not None:
        spec = spec.with_parts(resources=with_workers(spec.resources, workers))
    directory = run_directory(job.name, run_dir)
    result = (
        planned_locally(spec, directory, trace)
        if machine is None
        else planned_on_paper(spec, machine, trace, directory)
    )
    planned = result.plan
    return JobPlan(
        layout=planned.chosen.layout,
        workers=planned.chosen.layout.world,
        step_seconds=result.step_seconds,
        tokens_per_step=planned.tokens,
        memory_bytes=round(result.traced.needed(planned.chosen.memory, result.on_cpu)),
        fits=result.traced.fits(planned, result.on_cpu),
        device=planned.machine.name or "this machine",
        layouts=tuple(map(_shown, planned.candidates)),
        rejected=planned.rejected,
        assumed=result.assumed,
        refused=result.refused,
    )


def _shown(candidate: Candidate) -> PlannedLayout:
    return PlannedLayout(candidate.layout, candidate.seconds, round(candidate.memory))

"""Resolve the argument RUN of a command: a run directory, or a job of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.chain import chain_at, progress_of
from orchestrator.cli.options import existing_run, run_names
from orchestrator.config.errors import Absent, InputError, Unreachable
from orchestrator.config.outcome import ENDED

if TYPE_CHECKING:
    from cluster.jobs.ray_jobs import Jobs, Submission
    from orchestrator.storage.run_directory import RunDir

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="a run directory: a path or URI, or its name in runs/; or the name of a cluster's job",
        show_default=False,
        autocompletion=run_names,
    ),
]


def job_at(target: str, address: str | None) -> tuple[Jobs, Submission]:
    """The newest submission with that name and its cluster. Raises InputError if no submission or cluster exists."""
    from orchestrator.launch.submission import existing, jobs_at

    try:
        jobs = jobs_at(address)
        return jobs, existing(jobs, target)
    except Absent:
        existing_run(target)  # raises, because neither such a run nor a cluster exists
        raise


def job_named(target: str, address: str | None) -> tuple[Jobs, Submission] | None:
    """Like `job_at`, but None for a path, and if no job of that name or no cluster exists."""
    try:
        return None if "/" in target else job_at(target, address)
    except InputError:
        return None


def run_at(target: str) -> RunDir | None:
    """The run directory of that name; None if it has no run or is not readable from this machine."""
    try:
        return existing_run(target)[0] if target else None
    except (Absent, Unreachable):
        return None


def is_waiting(job: Submission) -> bool:
    """Whether a job that the cluster runs trains nothing yet: its run waits for its turn or for workers.

    False where its run directory is not readable from this machine. A chain waits if none of its stages is running.
    """
    from orchestrator.observe.last_status import WAITING, last_status, state_of
    from orchestrator.storage.run_directory import RunDir

    if job.has_ended or job.started is None:
        return False
    try:
        if (chain := chain_at(job.run_dir)) is not None:
            from orchestrator.chain.results import WAITING as NOT_BEGUN

            states = [stage["state"] for stage in progress_of(*chain)["stages"]]
            states = [state for state in states if state not in (*ENDED, NOT_BEGUN)]
        else:
            status = last_status(RunDir(job.run_dir))
            states = [] if job.came_after(status.get("time")) else [state_of(status)]
    except (InputError, OSError):
        return False
    return set(states) == {WAITING}


def shown_of(job: Submission) -> dict[str, Any]:
    """Return a job as `list` and `status` show it.

    The state is `waiting` if its run waits for its turn or for workers, while Ray says `running`.
    """
    from orchestrator.observe.last_status import WAITING

    waits = is_waiting(job)
    return {**job.to_json(), "state": WAITING if waits else job.state, "waiting": waits}


def before_status(job: Submission) -> str:
    """Return what a job does whose run has written no status since its submission."""
    if job.has_ended:
        return job.message
    if job.started is None:
        return "Ray starts its command"
    if (chain := chain_at(job.run_dir)) is not None:
        from orchestrator.chain.results import WAITING as NOT_BEGUN

        begun = [stage for stage in progress_of(*chain)["stages"] if stage["state"] != NOT_BEGUN]
        return ", ".join(f"{stage['stage']}: {stage['state']}" for stage in begun) or "no stage has begun"
    return "its command checks the job and starts the controller"


def has_commit(job: Submission) -> bool | None:
    """Whether a job has a checkpoint to resume from; a chain has them in its stages. None if its run directory is not
    readable from this machine, or does not exist yet."""
    from orchestrator.checkpoint.commit_store import Store

    try:
        if chain_at(job.run_dir) is not None or (run := run_at(job.run_dir)) is None:
            return None
        return Store(run.commits).latest(deep=False) is not None
    except (InputError, OSError):
        return None

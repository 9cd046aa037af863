"""Starting runs from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api.job import Job
from orchestrator.api.place import run_directory
from orchestrator.api.run import Run, RunFailed
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome


def run(
    job: Job,
    run_dir: str | Path | None = None,
    *,
    address: str | None = None,
    until: int | None = None,
    show: Callable[[dict[str, Any]], None] | None = None,
    priority: int = 0,
) -> Run:
    """Train a job to its end, here or on the Ray cluster at `address`, or continue it from its last commit.

    Args:
        run_dir: the run directory, by default runs/<name>.
        until: end at this step, with a commit.
        show: called with the status several times a second. What it raises ends the run with a commit, and is raised.
        priority: that of the run on a shared cluster.

    Returns the run, which is done, or stopped with a commit in place. Raises InputError before anything is written if
    the job is wrong or this process is connected to Ray already, and RunFailed if the run fails. Ctrl-C ends it with a
    commit.
    """
    from orchestrator.launch.run import run as drive

    _check(job, until, priority)
    directory = run_directory(job.name, run_dir)
    found = drive(job.spec, directory, until, address, show or (lambda status: None), (), priority)
    if found.outcome == Outcome.FAILED:
        raise RunFailed(found.line or "see events()")
    if found.outcome == Outcome.WRONG_INPUT:
        raise InputError(found.line)
    return Run(directory, job.spec)


def submit(
    job: Job,
    run_dir: str | Path | None = None,
    *,
    address: str | None = None,
    until: int | None = None,
    priority: int = 0,
    working_dir: str | Path | None = None,
    exclude: Sequence[str] = (),
) -> Run:
    """Make a job one of a Ray cluster, and return its run at once; a job of the same name continues from its last
    commit.

    Args:
        address: that of the cluster, by default what Ray's variables or the local cluster say.
        working_dir: a folder that is sent along, as for own code; `exclude` are patterns of files that are not.

    Raises InputError if the job is wrong, no cluster answers, or the job is at work with another file.
    """
    from orchestrator.launch import submission

    _check(job, until, priority)
    directory = run_directory(job.name, run_dir)
    environment: dict[str, Any] = {}
    if working_dir is not None:
        folder = Path(working_dir).absolute()
        if not folder.is_dir():
            raise InputError("there is no such folder", f"working_dir {working_dir}", "give another")
        environment = submission.sent_along(folder, exclude, "working_dir")
    submission.entrypoint(job.spec, directory, until, priority)  # refuses a job with a secret
    jobs = submission.jobs_at(address)
    found, _ = submission.submit(jobs, job.spec, directory, until, priority, environment)
    return Run(directory, job.spec, (jobs, found))


def _check(job: Job, until: int | None, priority: int) -> None:
    """Raise InputError for arguments of a wrong kind, which would be told late, or do something else."""
    if not isinstance(job, Job):
        raise InputError(f"is {type(job).__name__} and no Job", "job", "give Job(...), or Job.load(FILE)")
    if until is not None and (type(until) is not int or until < 1):
        raise InputError(f"{until!r} is no step", "until", "give a whole number of at least 1, or None")
    if type(priority) is not int:
        raise InputError(f"{priority!r} is no whole number", "priority", "give one")

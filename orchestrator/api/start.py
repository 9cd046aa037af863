"""Starting runs from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api.job import Job
from orchestrator.api.place import run_directory
from orchestrator.api.run import Run, RunFailed
from orchestrator.job.errors import InputError
from orchestrator.job.outcome import Outcome


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
        show: called with the status several times a second.
        priority: that of the run on a shared cluster.

    Returns the run, which is done, or stopped with a commit in place. Raises InputError before anything is written if
    the job is wrong, and RunFailed if the run fails. Ctrl-C ends it with a commit.
    """
    from orchestrator.launch.run import run as drive

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

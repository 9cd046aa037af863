"""Start runs from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api.job import Job
from orchestrator.api.place import run_directory
from orchestrator.api.run import Run, RunFailed
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.storage.run_directory import RunDir


def run(
    job: Job,
    run_dir: str | Path | None = None,
    *,
    address: str | None = None,
    until: int | None = None,
    show: Callable[[dict[str, Any]], None] | None = None,
    priority: int = 0,
    block: bool = True,
) -> Run:
    """Train a job to its end, here or on the Ray cluster at `address`, or resume it from its last checkpoint.

    Ctrl-C saves a checkpoint and ends the run. With block=False the run trains in a separate process, and this call
    returns at once: `Run.status` follows it, `Run.wait` waits for it, and `Run.stop` ends it. It goes on when this
    process ends.

    Args:
        job: the job to train.
        run_dir: the run directory, by default runs/<name>.
        address: a Ray cluster's address, or "auto"; without it Ray runs in this process.
        until: end at this step, with a checkpoint.
        show: called with the status several times a second. If it raises, the run saves a checkpoint and ends, and
            the exception is raised again.
        priority: the priority of the run on a shared cluster.
        block: whether to wait for the end.

    Returns:
        The run. If it was waited for, it is done, or stopped with a checkpoint.

    Raises:
        InputError: the job is wrong, or this process is already connected to Ray. Nothing is written then. With
            block=False `Run.wait` raises it as RunFailed.
        RunFailed: the run fails.
    """
    from orchestrator.launch.start_run import run as drive

    _check(job, until, priority)
    directory = run_directory(job.name, run_dir)
    if not block:
        if show is not None:
            raise InputError("is called while this process waits", "show", "leave it out, or read Run.status")
        return _in_background(job, directory, address, until, priority)
    outcome = drive(
        job.spec,
        directory,
        until=until,
        address=address,
        show=show or (lambda status: None),
        faults=(),
        priority=priority,
    )
    if outcome.outcome == Outcome.FAILED:
        raise RunFailed(outcome.line or "see events()")
    if outcome.outcome == Outcome.WRONG_INPUT:
        raise InputError(outcome.line)
    return Run(directory, job.spec)


def _in_background(job: Job, directory: RunDir, address: str | None, until: int | None, priority: int) -> Run:
    from orchestrator.api.background import BackgroundRun
    from orchestrator.launch.active_controller import refuse_if_active

    refuse_if_active(directory)
    begun = BackgroundRun(job, directory, address, until, priority)
    return Run(directory, job.spec, (begun, begun.submission))


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
    """Submit a job to a Ray cluster and return its run at once. A job with the same name resumes from its last
    checkpoint.

    Args:
        job: the job to train.
        run_dir: the run directory, by default runs/<name>.
        address: the cluster's address, by default from Ray's variables or the local cluster.
        until: end at this step, with a checkpoint.
        priority: the priority of the run on the cluster; higher ones run first.
        working_dir: a folder to send to the cluster, for own code.
        exclude: patterns of files in `working_dir` that are not sent.

    Raises:
        InputError: the job is wrong, no cluster answers, or the job already runs with another file.
    """
    from orchestrator.launch import submission
    from orchestrator.launch.submitted_job import SubmittedJob

    _check(job, until, priority)
    directory = run_directory(job.name, run_dir)
    environment: dict[str, Any] = {}
    if working_dir is not None:
        folder = Path(working_dir).absolute()
        if not folder.is_dir():
            raise InputError("there is no such folder", f"working_dir {working_dir}", "give another")
        environment = submission.sent_along(folder, exclude, "working_dir")
    command = submission.entrypoint(job.name, job.spec.document(), directory, until, priority)
    jobs = submission.jobs_at(address)
    SubmittedJob(job.spec).check(directory, until)
    submitted, _ = submission.submit(
        jobs, job.name, command, run=directory, priority=priority, runtime_env=environment
    )
    return Run(directory, job.spec, (jobs, submitted))


def _check(job: Job, until: int | None, priority: int) -> None:
    """Raise InputError for arguments of a wrong type, which would fail late or act differently."""
    if not isinstance(job, Job):
        raise InputError(
            f"must be a Job, not {type(job).__name__}", "job", "give Job(...), or Job.load(FILE)"
        )
    if until is not None and (type(until) is not int or until < 1):
        raise InputError(f"must be an integer of at least 1, or None (got {until!r})", "until")
    if type(priority) is not int:
        raise InputError(f"must be an integer (got {priority!r})", "priority")

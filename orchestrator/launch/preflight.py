"""All checks of a job before anything is started or written: `preflight` is the whole list.

Every check raises InputError with the key of the job file, or the option, that is wrong. Independent checks all run, so
that a user sees all problems at once.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.workers.machine import host_memory
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.launch.begun_job import BegunJob
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.machine_checks import check_machine, check_room
from orchestrator.launch.path_checks import check_all_uris, check_written
from orchestrator.launch.worker import worker_at
from orchestrator.planner.host_memory import check_host_memory, state_bytes
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.config import TrainSpec
from workloads.hf.files.hf_config import FolderConfig


def preflight(
    spec: JobSpec,
    run_dir: RunDir,
    until: int | None,
    address: str | None,
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
) -> ResolvedJob:
    """Check a run completely without starting anything. Return the resolved job.

    A run that has begun keeps its own settings, see `as_begun`. `begin` and `is_known` are as in `check_job`.
    """
    check_all_uris(spec, run_dir)
    check_written(spec.checkpoint, spec.data, run_dir, address)
    problems = Problems()
    begun = BegunJob(spec)
    with problems.noted():
        begun = begun.in_run(run_dir)
    with problems.noted():
        job = check_on_machine(
            begun.spec,
            address,
            begun.prepared,
            begin,
            is_known,
            folder_config=begun.folder_config,
            begins=begun.begins,
        )
    with problems.noted():
        check_until(until, spec.train)
    problems.raise_noted()
    check_begins(job, run_dir, begun.commit)
    check_room(job, run_dir, address, resumes=not begun.begins)
    return job


def check_until(until: int | None, train: TrainSpec) -> None:
    """Raise InputError if the job ends before the step `until`."""
    if until is not None and until > train.steps:
        raise InputError(f"step {until} is beyond train.steps {train.steps}", "--until", "lower it")


def check_on_machine(
    spec: JobSpec,
    address: str | None,
    prepared: str = "",
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
    *,
    folder_config: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob:
    """Check a job, and this machine for it; see `check_job`. Return the resolved job."""
    problems = Problems()
    with problems.noted():
        machine_of = worker_at(address)
        job = check_job(
            spec, prepared, begin, is_known, machine_of, folder_config=folder_config, begins=begins
        )
    with problems.noted():
        check_machine(spec.resources, spec.all_workers, address)
    problems.raise_noted()
    if address is None:
        state = state_bytes(spec.train.optimizer, spec.checkpoint.ema, job.shape, pruned=spec.pruned_bytes)
        check_host_memory(spec.resources, state, host_memory())
    return job

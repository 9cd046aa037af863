"""All checks of a job before anything is started or written: `preflight` is the whole list.

Every check raises InputError with the key of the job file, or the option, that is wrong. Independent checks all run, so
that a user sees all problems at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from cluster.workers.machine import host_memory
from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.data.prepare.record_kind import kind_of
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.machine_checks import check_machine, check_room
from orchestrator.launch.path_checks import check_all_places, check_written
from orchestrator.launch.worker import worker_at
from orchestrator.models.continued import continuation_of
from orchestrator.models.kept_config import check_same_config, kept_config
from orchestrator.planner.host_memory import check_host_memory, state_bytes
from orchestrator.resolve.commit_model import as_begun, check_implementation
from orchestrator.resolve.precision import as_its_run
from orchestrator.resolve.prepared_data import prepared_before
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir
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
    check_all_places(spec, run_dir)
    check_written(spec.checkpoint, spec.data, run_dir, address)
    problems = Problems()
    prepared = ""
    kept: FolderConfig | None = None
    begins = False
    with problems.noted():
        if run_dir.rows(TRIALS):
            hint = f"give the run a folder of its own: --run-dir {shlex.quote(f'{run_dir.uri}-run')}; or use tune"
            raise InputError("is the folder of a search", run_dir.uri, hint)
        spec = spec.with_parts(train=as_its_run(spec.train, run_dir))
        commit = check_same_run(spec.run_identity, run_dir)
        begins = commit is None
        check_implementation(spec.workload, commit, run_dir.uri)
        prepared = prepared_before(spec.data, run_dir, commit)
        begun = continuation_of(spec).begun_from(run_dir, commit)[1]
        check_same_config(spec.workload, begun, run_dir.uri)
        spec = spec.with_parts(workload=as_begun(spec.workload, begun))
        kept = kept_config(begun)
        if commit is None:
            kind_of(spec.data, spec.workload.objective)
    with problems.noted():
        job = check_here(spec, address, prepared, begin, is_known, kept=kept, begins=begins)
    if until is not None and until > spec.train.steps:
        with problems.noted():
            raise InputError(f"step {until} is beyond train.steps {spec.train.steps}", "--until", "lower it")
    problems.raise_noted()
    check_begins(job, run_dir, commit)
    check_room(job, run_dir, address, resumes=not begins)
    return job


def check_here(
    spec: JobSpec,
    address: str | None,
    prepared: str = "",
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
    *,
    kept: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob:
    """Check a job, and this machine for it; see `check_job`. Return the resolved job."""
    problems = Problems()
    with problems.noted():
        machine_of = worker_at(address)
        job = check_job(spec, prepared, begin, is_known, machine_of, kept=kept, begins=begins)
    with problems.noted():
        check_machine(spec.resources, spec.all_workers, address)
    problems.raise_noted()
    if address is None:
        state = state_bytes(spec.train.optimizer, spec.checkpoint.ema, job.shape, pruned=spec.pruned_bytes)
        check_host_memory(spec.resources, state, host_memory())
    return job

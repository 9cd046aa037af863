"""Check a job that a cluster will run, before it is submitted."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import extension_of
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.own_code import cleaning_functions
from orchestrator.launch.begun_job import BegunJob
from orchestrator.launch.finished import PastRun
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.job_checks import check_job, check_layouts
from orchestrator.launch.job_needs import needed_libraries
from orchestrator.launch.job_paths import is_here, read_paths
from orchestrator.launch.machine_checks import check_memory
from orchestrator.launch.offline_checks import check_on_paper
from orchestrator.launch.path_checks import check_uris
from orchestrator.launch.preflight import check_until
from orchestrator.launch.worker import worker_named
from orchestrator.planner.device import BOUNDLESS
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.resolve.resolved_job import ResolvedJob, resolve
from orchestrator.storage.uri import is_local
from workloads.errors import WorkloadError
from workloads.own.object_reference import CannotImport, load, root_of

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec
    from orchestrator.planner.choose_precision import MachineOf
    from orchestrator.storage.run_directory import RunDir


class SubmittedJob:
    """A job that a cluster will run, checked as far as this machine can tell.

    No store is asked. Files, code and libraries that this machine lacks are left to the run, because the cluster may
    have them. A path that exists here counts as the cluster's.
    """

    def __init__(self, job: JobSpec, made: tuple[str, ...] = ()) -> None:
        """`made` are folders that need not be here, because others make them first."""
        self._job = job
        self._made = made
        self._texts = [uri for _, source in job.every_source for uri in source.uris]

    def check(self, run: RunDir, until: int | None) -> None:
        """Run those checks of the job's run that do not depend on the machine. Starts and writes nothing.

        Args:
            run: its run directory.
            until: the step at which it is to stop; None for none.

        Raises:
            InputError: with all problems.
        """
        job = self._job
        problems = Problems()
        has_parts = self._has_parts()
        has_run = run.local and not run.is_gone()
        begun = BegunJob(job, begins=not has_run)
        if has_run:
            with problems.noted():
                run.check_ours()
                if not has_parts or not is_local(data_cache(job.data, run)):
                    extension_of(job.identity(), run, Store(run.commits).latest(deep=False))
                elif PastRun(job, run).done():
                    return  # nothing is left to do, whatever the job names
                else:
                    begun = begun.in_run(run)
        with problems.noted():
            check_until(until, job.train)
        machine_of = worker_named(job.resources)
        resolved: ResolvedJob | None = None
        with problems.noted():
            if has_parts:
                check_uris(job.data, job.checkpoint.export_to, job.every_source, run)
                resolved = self._checked(begun, machine_of or (lambda *_: BOUNDLESS))
                if not problems:
                    check_begins(resolved, run, begun.commit)
            else:
                with contextlib.suppress(InputError):
                    resolved = resolve(job)
        problems.raise_noted()
        if resolved is not None and machine_of is not None and job.resources.must_fit:
            resolved = in_chosen_precision(resolved, machine_of)
            machine = machine_of(resolved.spec.resources, resolved.spec.train.dtype)
            # The run itself checks rollout workers: only it knows whether it has a commit, and must go on.
            check_memory(resolved, machine, resumes=True)

    @property
    def is_here(self) -> bool:
        """Whether this machine has all that the checks of the job read, import or call."""
        return self._has_parts() and all(map(is_here, self._texts))

    def _checked(self, begun: BegunJob, machine_of: MachineOf) -> ResolvedJob:
        """Check a job of which this machine lacks the text at most, and return it, resolved."""
        if all(map(is_here, self._texts)):
            return check_job(
                begun.spec,
                begun.prepared,
                machine_of=machine_of,
                folder_config=begun.folder_config,
                begins=begun.begins,
            )
        resolved = in_chosen_precision(check_on_paper(begun.spec)[0], machine_of)
        check_layouts(resolved)
        return resolved

    def _has_parts(self) -> bool:
        """Return whether this machine has all that the checks of the job read, import or call, its text aside."""
        job = self._job
        elsewhere = {*self._texts, job.resources.notices}
        paths = [path for path in read_paths(job) if path not in elsewhere]
        return (
            all(path.startswith(self._made) or is_here(path) for path in paths)
            and all(need.finding.verdict == "ok" for need in needed_libraries(job))
            and all(map(_is_importable, (*job.own_code, *cleaning_functions(job.data.clean))))
        )


def _is_importable(reference: str) -> bool:
    """Return whether the module of a `module:name` is here and can be imported. It may lack the name."""
    try:
        root_of(reference)
    except WorkloadError:
        return False
    with contextlib.suppress(WorkloadError):
        try:
            load(reference)
        except CannotImport:
            return False
    return True

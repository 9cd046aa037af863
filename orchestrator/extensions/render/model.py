"""Check the model of a job for rendered machines, as far as this machine knows it."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.data.encoding import tokenizer
from orchestrator.launch.job_checks import check_layouts, check_objective_of
from orchestrator.launch.offline_checks import with_vocabulary
from orchestrator.planner.device import BOUNDLESS
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.resolved_job import ResolvedJob, resolve
from orchestrator.storage.uri import is_local
from workloads.hf.files.hf_config import FOLDER


def check_could_run(spec: JobSpec) -> None:
    """Raise InputError, as `plan` does, for a job that could not run on any machine.

    Its model is unknown or does not fit the objective, or it has no legal layout on its workers. A user's own code is
    not checked, because it may differ on the other machines.
    """
    job = resolved_here(spec)
    if isinstance(job, ResolvedJob) and not spec.own_code:
        check_objective_of(job)
        check_layouts(job)


def resolved_here(spec: JobSpec) -> ResolvedJob | InputError:
    """Resolve a job. Return the error instead if it concerns a folder or own code, which may exist on other machines.

    Raises InputError for everything that would also be wrong there.
    """
    try:
        # A tokenizer on a store is not read, because this machine need not reach the store.
        data, _ = with_vocabulary(
            spec.data, spec.workload, lambda uri: is_local(uri) and tokenizer.is_there(uri)
        )
        return in_chosen_precision(resolve(spec.with_parts(data=data)), lambda *_: BOUNDLESS)
    except InputError as error:
        model = spec.workload.model
        if spec.own_code or (model.startswith(FOLDER) and not Path(model.removeprefix(FOLDER)).is_dir()):
            return error
        raise

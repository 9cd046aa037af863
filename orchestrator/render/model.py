"""The model of a job that machines are rendered for, as far as it is known here."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import used_by
from orchestrator.config.spec import JobSpec
from orchestrator.data.encoding import tokenizer
from orchestrator.launch.offline_checks import with_vocabulary
from orchestrator.launch.preflight import check_layouts, check_objective
from orchestrator.planner.device import BOUNDLESS
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.resolved_job import ResolvedJob, resolve
from orchestrator.storage.uri import is_local
from workloads.hf.hf_config import FOLDER


def check_could_run(spec: JobSpec) -> None:
    """Raise InputError, as `plan` does, for a job that could run on no machines: its model is unknown, is not for the
    objective, or has no legal layout on as many workers as it wants. Of the user's own code, which may differ there,
    nothing is refused."""
    job = resolved_here(spec)
    if isinstance(job, ResolvedJob) and not used_by(spec):
        check_objective(job)
        check_layouts(job)


def resolved_here(spec: JobSpec) -> ResolvedJob | InputError:
    """The job, resolved, or why it is not here, where that may be there: a folder, the user's own code. Raises
    InputError for what is wrong there too."""
    try:
        # A tokenizer on a store is not asked for its size: who renders need not reach the store.
        known, _ = with_vocabulary(spec, lambda uri: is_local(uri) and tokenizer.is_there(uri))
        return in_chosen_precision(resolve(known), lambda spec: BOUNDLESS)
    except InputError as error:
        model = spec.workload.model
        if used_by(spec) or (model.startswith(FOLDER) and not Path(model.removeprefix(FOLDER)).is_dir()):
            return error
        raise

"""Prepare the data of a job file for a command that does not train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec
    from orchestrator.resolve.prepared_data import PreparedData


def prepared_job(
    job: Path, overrides: list[str] | None, run_dir: str | None, address: str | None
) -> tuple[JobSpec, PreparedData]:
    """Return a job and its token shards, after the checks that need no model. Ray makes what is missing. Raises
    InputError.
    """
    from orchestrator.cli.options import job_of, run_of
    from orchestrator.launch.job_checks import JobChecks
    from orchestrator.launch.own_sources import make_own_sources
    from orchestrator.launch.path_checks import check_all_uris
    from orchestrator.launch.preparation import prepared_with_progress
    from orchestrator.observe.console import ProgressDisplay
    from orchestrator.resolve.prepared_data import PreparedData

    spec = job_of(job, overrides)
    run = run_of(spec.name, run_dir)
    check_all_uris(spec, run)
    with ProgressDisplay() as display:
        make_own_sources(spec.data, address, lambda line: display.update({"phase": "prepare", "note": line}))
    JobChecks(spec).without_model()
    return spec, prepared_with_progress(spec, run, PreparedData(), address)

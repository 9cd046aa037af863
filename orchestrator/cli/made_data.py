"""Token shards for a command: checked, made where they are missing, with progress on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec
    from orchestrator.resolve.prepared_data import PreparedData
    from orchestrator.storage.run_directory import RunDir


def make_data(spec: JobSpec, run: RunDir, address: str | None) -> PreparedData:
    """Return the token shards of a job, after the checks that need no model; make what is missing. Raises
    InputError.
    """
    from orchestrator.launch.job_checks import JobChecks
    from orchestrator.launch.own_sources import make_own_sources
    from orchestrator.launch.path_checks import check_all_places
    from orchestrator.launch.preparation import prepared_with_progress
    from orchestrator.observe.console import ProgressDisplay
    from orchestrator.resolve.prepared_data import PreparedData

    check_all_places(spec, run)
    with ProgressDisplay() as display:
        make_own_sources(spec.data, address, lambda line: display.update({"phase": "prepare", "note": line}))
    JobChecks(spec).without_model()
    return prepared_with_progress(spec, run, PreparedData(), address)

"""Prepare the data of a job on Ray for a command or a call that waits for it."""

from __future__ import annotations

import contextlib

from orchestrator.config.spec import JobSpec
from orchestrator.data.progress import StageLine
from orchestrator.launch.submission import on_cluster
from orchestrator.observe.console import ProgressDisplay
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.run_directory import RunDir


def prepared_with_progress(
    spec: JobSpec, run: RunDir, before: PreparedData, address: str | None
) -> PreparedData:
    """Return the job's prepared data. Ray prepares missing parts; the progress is shown on standard error.

    Args:
        spec: the job.
        run: the run directory.
        before: what the run began with.
        address: the cluster, None to start Ray on this machine.

    Raises InputError.
    """
    alone = spec.data.samples is not None  # this process prepares own samples
    session = contextlib.nullcontext() if alone else on_cluster(address)
    with ProgressDisplay() as progress, session:
        line = StageLine(lambda text: progress.update({"phase": "prepare", "note": text}))
        return prepared(spec, run, before, line)

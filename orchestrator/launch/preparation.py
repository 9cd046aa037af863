"""Prepare the data of a job on Ray for a command or a call that waits for it."""

from __future__ import annotations

import contextlib

from orchestrator.config.spec import JobSpec
from orchestrator.data.progress import StageLine
from orchestrator.launch.submission import no_cluster
from orchestrator.observe.console import ProgressDisplay
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.run_directory import RunDir


def prepared_with_progress(
    spec: JobSpec, run: RunDir, before: PreparedData, address: str | None
) -> PreparedData:
    """Return the job's prepared data, made with Ray as far as it is missing, with its progress on standard error.

    Args:
        spec: the job.
        run: the run directory.
        before: what the run began with.
        address: the cluster, None to start Ray on this machine.

    Raises InputError.
    """
    from cluster.local.ray_session import NoCluster, connected_ray

    try:
        alone = spec.data.samples is not None  # which are prepared by this process
        session = contextlib.nullcontext() if alone else connected_ray(address)
        with ProgressDisplay() as progress, session:
            line = StageLine(lambda text: progress.update({"phase": "prepare", "note": text}))
            return prepared(spec, run, before, line)
    except NoCluster as error:
        raise no_cluster(error, address) from None

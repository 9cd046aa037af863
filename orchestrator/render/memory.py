"""Host memory of the workers that machines are rendered for."""

from __future__ import annotations

import dataclasses
import math

from cluster.render.needs import ClusterNeeds
from cluster.render.pods import SHARED_MEMORY_GIB
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.planner.host_memory import worker_bytes
from orchestrator.render.model import resolved_here

PROCESS_GIB = 4
"""Of a worker's memory, for all but what it saves: processes with their libraries, CUDA's contexts, batches."""


def with_host_memory(spec: JobSpec, needs: ClusterNeeds, given: float | None) -> tuple[ClusterNeeds, str]:
    """The needs with the memory of a worker: `given` in GiB, else what the planner counts for the fewest workers that
    the job may have. With it a line for whoever renders, empty if there is nothing to say.

    Raises InputError if the run would refuse what is given, or the job's model.
    """
    if not needs.gpu:
        return dataclasses.replace(needs, memory_gib=given or PROCESS_GIB), ""
    shared = SHARED_MEMORY_GIB / needs.per_node
    job = resolved_here(spec)
    if isinstance(job, InputError):
        line = f"what a worker saves is not known here ({job}): --memory-gib says how much memory it needs"
        known_gib = given or math.ceil(PROCESS_GIB + shared)
        return dataclasses.replace(needs, memory_gib=known_gib), line * (given is None)

    def saved(workers: int) -> float:
        return worker_bytes(spec, job.shape, workers) / 2**30

    def in_all(workers: int) -> int:
        return math.ceil(PROCESS_GIB + saved(workers) + shared)

    least, most = spec.resources.workers.min, spec.resources.workers.max
    line = (
        f"a worker needs {in_all(least)} GiB of memory: {PROCESS_GIB} for its processes, {saved(least):.1f} for two "
        f"copies of the run's state among {least}, {shared:.1f} of /dev/shm"
    )
    if in_all(most) < in_all(least):
        line += f"; of {most} workers each needs {in_all(most)}"
    if given is None:
        return dataclasses.replace(needs, memory_gib=in_all(least)), f"{line}; --memory-gib says otherwise"
    if saved(most) > given:
        what = f"two copies of the run's state are {saved(most):.1f} GiB of each of {most} workers"
        raise InputError(what, f"--memory-gib {given:g}", f"leave it out, or give {in_all(most)}")
    return dataclasses.replace(needs, memory_gib=given), line * (given < in_all(least))

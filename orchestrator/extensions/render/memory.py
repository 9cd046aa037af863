"""Choose the host memory of workers for rendered machines."""

from __future__ import annotations

import dataclasses
import math

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.model import resolved_here
from orchestrator.extensions.render.pods import SHARED_MEMORY_GIB
from orchestrator.planner.host_memory import state_bytes, worker_bytes

PROCESS_GIB = 4
"""GiB of a worker's memory for everything but the saved state: processes, libraries, CUDA contexts, batches."""


def with_host_memory(spec: JobSpec, needs: ClusterNeeds, given: float | None) -> tuple[ClusterNeeds, str]:
    """Set the memory of a worker.

    Args:
        spec: the job.
        needs: what the job needs of its machines.
        given: the memory in GiB, None for what the planner computes for the smallest number of workers.

    Returns:
        The needs, and a note for the user, empty without one.

    Raises:
        InputError: the run would refuse the given memory, or the job's model is wrong.
    """
    if not needs.gpu:
        return dataclasses.replace(needs, memory_gib=given or PROCESS_GIB), ""
    shared = SHARED_MEMORY_GIB / needs.per_node
    job = resolved_here(spec)
    if isinstance(job, InputError):
        line = f"what a worker saves is not known here ({job}): --memory-gib says how much memory it needs"
        known_gib = given or math.ceil(PROCESS_GIB + shared)
        return dataclasses.replace(needs, memory_gib=known_gib), line * (given is None)

    state = state_bytes(spec.train.optimizer, spec.checkpoint.ema, job.shape, pruned=spec.pruned_bytes)

    def saved(workers: int) -> float:
        return worker_bytes(spec.resources, state, workers) / 2**30

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
        problem = f"two copies of the run's state are {saved(most):.1f} GiB of each of {most} workers"
        raise InputError(problem, f"--memory-gib {given:g}", f"leave it out, or give {in_all(most)}")
    return dataclasses.replace(needs, memory_gib=given), line * (given < in_all(least))

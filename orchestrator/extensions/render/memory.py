"""Choose the host memory of workers for rendered machines."""

from __future__ import annotations

import dataclasses
import math

from cluster.workers.gang import workers_text
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.model import resolved_here
from orchestrator.extensions.render.pods import SHARED_MEMORY_GIB
from orchestrator.planner.host_memory import state_bytes, worker_bytes

PROCESS_GIB = 4
"""GiB of a worker's memory for everything but the saved state: processes, libraries, CUDA contexts, batches."""


def with_host_memory(
    spec: JobSpec, needs: ClusterNeeds, memory_gib: float | None
) -> tuple[ClusterNeeds, str]:
    """Set the memory of a worker.

    Args:
        spec: the job.
        needs: what the job needs of its machines.
        memory_gib: the memory in GiB; None for what the planner computes for the smallest number of workers.

    Returns:
        The needs, and a note for the user, empty without one.

    Raises:
        InputError: the run would refuse the given memory, or the job's model is wrong.
    """
    if not needs.gpu:
        return dataclasses.replace(needs, memory_gib=memory_gib or PROCESS_GIB), ""
    shared = SHARED_MEMORY_GIB / needs.per_node
    job = resolved_here(spec)
    if isinstance(job, InputError):
        line = f"the size of a worker's checkpoint is unknown here ({job}): give its memory by --memory-gib"
        known_gib = memory_gib or math.ceil(PROCESS_GIB + shared)
        return dataclasses.replace(needs, memory_gib=known_gib), line * (memory_gib is None)

    state = state_bytes(spec.train.optimizer, spec.checkpoint.ema, job.shape, pruned=spec.pruned_bytes)

    def saved(workers: int) -> float:
        return worker_bytes(spec.resources, state, workers) / 2**30

    def in_all(workers: int) -> int:
        return math.ceil(PROCESS_GIB + saved(workers) + shared)

    min_workers, max_workers = spec.resources.workers.min, spec.resources.workers.max
    line = (
        f"a worker needs {in_all(min_workers)} GiB of memory: {PROCESS_GIB} for its processes, "
        f"{saved(min_workers):.1f} for two copies of the run's state among {min_workers}, {shared:.1f} of /dev/shm"
    )
    if in_all(max_workers) < in_all(min_workers):
        line += f"; of {max_workers} workers each needs {in_all(max_workers)}"
    if memory_gib is None:
        return dataclasses.replace(
            needs, memory_gib=in_all(min_workers)
        ), f"{line}; --memory-gib says otherwise"
    if saved(max_workers) > memory_gib:
        size = f"{saved(max_workers):.1f} GiB of each of {workers_text(max_workers)}"
        problem = f"two copies of the run's state are {size}"
        raise InputError(
            problem, f"--memory-gib {memory_gib:g}", f"leave it out, or give {in_all(max_workers)}"
        )
    return dataclasses.replace(needs, memory_gib=memory_gib), line * (memory_gib < in_all(min_workers))

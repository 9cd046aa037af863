"""Check the machine that a job runs on: its labels, its GPUs, its memory and its disk.

Every check raises InputError, as those of `preflight` do.
"""

from __future__ import annotations

import os
import shutil

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec, Workers
from orchestrator.launch.worker import local_worker
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.host_memory import MUST_FIT_HINT, state_bytes
from orchestrator.planner.rollouts import check_rollout_workers
from orchestrator.planner.teacher_workers import check_teacher_workers
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local, local_path


def check_space(resources: ResourceSpec, needed: float, uri: str) -> None:
    """Raise InputError if the disk of a local run directory has less room than the bytes that a commit needs.

    The folder need not exist.
    """
    if not is_local(uri) or not resources.must_fit:
        return
    folder = local_path(uri)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if free < needed:
        problem = (
            f"a commit of this run takes {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB free"
        )
        raise InputError(problem, f"--run-dir {uri}", f"free some, or give another folder; {MUST_FIT_HINT}")


def check_room(job: ResolvedJob, run_dir: RunDir, address: str | None, resumes: bool = False) -> None:
    """Check that the disk has room for a commit and, if the job runs here, memory for its workers.

    `address` is the cluster that the job runs on, None for this machine. A run that `resumes` a commit may have rollout
    workers that do not fit: it gets a note.
    """
    needed = state_bytes(job.spec.train.optimizer, job.spec.checkpoint.ema, job.shape, as_lower_bound=True)
    check_space(job.spec.resources, needed, run_dir.uri)
    if address is None:
        # The controller notes that a run which goes on has no room for its rollout workers.
        resources = job.spec.resources if resumes else job.spec.shared_resources
        check_memory(job, local_worker(resources, job.spec.train.dtype), resumes)


def check_memory(job: ResolvedJob, machine: Machine, resumes: bool = False) -> None:
    """Check that the job is not predicted to run out of memory on such workers, unless `must_fit` is off."""
    if job.spec.resources.must_fit:
        from orchestrator.planner.trace.layout_memory import check_fits

        check_fits(job, machine)
    if not resumes:
        demand = demand_of(job.spec)
        check_rollout_workers(demand, job.shape, machine)
        check_teacher_workers(demand, job.shape, machine)


def check_machine(resources: ResourceSpec, every: Workers, address: str | None) -> None:
    """Check that this machine has the labels and GPUs that the job asks for, if it runs here (`address` is None)."""
    check_labels(resources, address)
    if address is None and resources.per_worker.gpu:
        local_gpus(every)


def local_gpus(every: Workers) -> int:
    """Return how many GPUs an embedded cluster claims for the workers of a run, one each.

    Raises InputError if this machine has too few.
    """
    import torch

    available = torch.cuda.device_count()
    if available < every.min:
        gpus = f"{every.min} GPU{'s' * (every.min > 1)}"
        problem = f"the smallest gang needs {gpus}, but this machine has {available or 'none'}"
        raise InputError(problem, "resources.per_worker.gpu", "set it to 0, or name a cluster with --address")
    return min(every.max, available)


def check_labels(resources: ResourceSpec, address: str | None) -> None:
    """Raise InputError if the job asks for labelled nodes but runs on this machine, which has no labels."""
    if address is None and resources.per_worker.labels:
        hint = "--set 'resources.per_worker.labels={}' leaves them out; or name a cluster with --address"
        raise InputError("only a cluster's nodes have labels", "resources.per_worker.labels", hint)

"""Describe one worker of a job to the planner: on this machine, or on a cluster."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial

from cluster.workers.gang import Bundle
from cluster.workers.machine import ACCELERATOR, Offer, smallest_offer
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.launch.submission import on_cluster
from orchestrator.planner.choose_precision import MachineOf
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import profile_of_accelerator
from orchestrator.planner.machines import machine_for
from orchestrator.train.config import Precision


def worker_at(address: str | None) -> MachineOf:
    """Return a function that describes a worker of a job on the cluster at `address`, or on this machine if None."""
    return local_worker if address is None else partial(cluster_worker, address=address)


def local_worker(resources: ResourceSpec, precision: Precision) -> Machine:
    """Describe a worker on this machine. Workers without a GPU share the memory of the machine."""
    worker = resources.per_worker
    machine = machine_for(None, worker.bundle, precision)
    if not worker.gpu:
        return replace(machine, memory=machine.memory / resources.workers.max)
    import torch

    if not torch.cuda.is_available():  # `local_gpus` refuses a run without GPUs
        return machine
    return replace(machine, memory=float(torch.cuda.get_device_properties(0).total_memory))


def worker_named(resources: ResourceSpec) -> MachineOf | None:
    """Return a function that describes a worker with the accelerator that the job's label asks for.

    Returns None without such a label, or if the accelerator has no profile.
    """
    worker = resources.per_worker
    name = worker.labels.get(ACCELERATOR, "")
    if not worker.gpu or profile_of_accelerator(name) is None:
        return None
    return lambda _, precision: machine_for(Offer(math.inf, name), worker.bundle, precision)


def cluster_worker(resources: ResourceSpec, precision: Precision, address: str) -> Machine:
    """Describe a worker by the job's label, or else by connecting to the cluster.

    Raises:
        InputError: the cluster does not answer, or it has no such worker yet and the GPU is unknown.
    """
    if (named := worker_named(resources)) is not None:
        return named(resources, precision)
    bundle = resources.per_worker.bundle
    offer = _offer(bundle, resources.workers.max, address)
    if offer is None and bundle.gpu:
        problem = "the cluster has no such worker yet, and its future GPU is unknown"
        hint = f"name it by resources.per_worker.labels: {{{ACCELERATOR}: H100}}, or the precision"
        raise InputError(problem, "train.precision auto", hint)
    return machine_for(offer, bundle, precision)


def _offer(bundle: Bundle, max_workers: int, address: str) -> Offer | None:
    if "ray" in sys.modules:  # not imported here, because Ray reads its token settings on import
        import ray

        if ray.is_initialized():
            return smallest_offer(bundle, max_workers)
    with on_cluster(address):
        return smallest_offer(bundle, max_workers)

"""A worker of a job that is to run, as the planner sees it: on this machine, or on a cluster."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial

from cluster.render.node_selection import ACCELERATOR
from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer, smallest_offer
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.launch.submission import no_cluster
from orchestrator.planner.device import Machine
from orchestrator.planner.machines import machine_for
from orchestrator.planner.precision import MachineOf
from orchestrator.planner.profile import of_accelerator


def worker_at(address: str | None) -> MachineOf:
    """What tells a worker of a job: one of the cluster at an address, see `worker_there`; without one, of this
    machine."""
    return worker_here if address is None else partial(worker_there, address=address)


def worker_here(spec: JobSpec) -> Machine:
    """A worker of a run on this machine, which its workers share."""
    worker = spec.resources.per_worker
    machine = machine_for(None, worker.bundle, spec.train.dtype)
    if not worker.gpu:
        return replace(machine, memory=machine.memory / spec.resources.workers.max)
    import torch

    if not torch.cuda.is_available():  # that it has none is told where it matters
        return machine
    return replace(machine, memory=float(torch.cuda.get_device_properties(0).total_memory))


def worker_named(spec: JobSpec) -> MachineOf | None:
    """What tells a worker of a job on the accelerator that its label asks for; None without one, or if no profile is
    known of it."""
    worker = spec.resources.per_worker
    name = worker.labels.get(ACCELERATOR, "")
    if not worker.gpu or of_accelerator(name) is None:
        return None
    return lambda each: machine_for(Offer(math.inf, name), worker.bundle, each.train.dtype)


def worker_there(spec: JobSpec, address: str) -> Machine:
    """A worker as the job names it, else as the cluster has it, which is connected to for that.

    Raises InputError if the cluster does not answer, or has none yet and nothing tells on which GPU it would be.
    """
    if (named := worker_named(spec)) is not None:
        return named(spec)
    bundle = spec.resources.per_worker.bundle
    offer = _offer(bundle, spec.resources.workers.max, address)
    if offer is None and bundle.gpu:
        what = "the cluster has no such worker yet, and nothing tells which GPU it will have"
        hint = f"name it by resources.per_worker.labels: {{{ACCELERATOR}: H100}}, or the precision"
        raise InputError(what, "train.precision auto", hint)
    return machine_for(offer, bundle, spec.train.dtype)


def _offer(bundle: Bundle, most: int, address: str) -> Offer | None:
    from cluster.local.ray_session import NoCluster, connected_ray

    if "ray" in sys.modules:  # to be imported, it has to know whether it asks for a token
        import ray

        if ray.is_initialized():
            return smallest_offer(bundle, most)
    try:
        with connected_ray(address):
            return smallest_offer(bundle, most)
    except NoCluster as error:
        raise no_cluster(error, address) from None

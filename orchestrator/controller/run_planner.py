"""The planner of a run on its cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cluster.workers.cluster import Cluster
from cluster.workers.machine import Offer
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.host_memory import check_workers_memory, state_bytes
from orchestrator.planner.machines import machine_for, machine_notes
from orchestrator.planner.planner import Planner
from orchestrator.planner.rollouts import check_rollout_workers, memory_problem


def planner_on(
    cluster: Cluster,
    demand: Demand,
    shape: ModelShape,
    *,
    job: str,
    is_stopped: Callable[[], bool],
    is_busy: Callable[[], bool],
    resumes: bool,
) -> tuple[Planner, list[str]]:
    """Return a planner for the smallest of a cluster's workers.

    Args:
        cluster: where the run's workers are.
        demand: what the job asks of the planner.
        shape: the model.
        job: the job as YAML, which the process that traces layouts reads.
        is_stopped: returns whether the run is to stop, which ends traces of layouts.
        is_busy: returns whether ranks run, so that no layout is traced.
        resumes: whether the run has a commit. A rollout worker that does not fit is then a note.

    Returns:
        The planner, and what a user should know about the workers, one line each.

    Raises:
        InputError: the host memory of the workers cannot hold the training state that a commit saves, or a rollout
            worker of a new run does not fit.
    """
    bundle = demand.resources.per_worker.bundle
    offer = cluster.offer(bundle, demand.resources.workers.max)
    if offer:
        state = state_bytes(demand.optimizer, demand.ema, shape, pruned=demand.pruned)
        check_workers_memory(demand.resources, state, offer.memory)
    machine = machine_for(offer, bundle, demand.precision)
    notes = machine_notes(machine, demand.precision)
    shared = _shared(cluster, demand, offer, machine)
    if shared is not None and resumes:
        problem = memory_problem(demand, shape, shared)
        notes += [f"{problem}: it may run out of memory"] if problem else []
    elif shared is not None:
        check_rollout_workers(demand, shape, shared)
    planner = Planner(
        demand,
        shape,
        machine,
        host=offer.memory if offer else None,
        confirm=partial(verdicts_before, job, machine, is_stopped),
        is_busy=is_busy,
    )
    return planner, notes


def _shared(cluster: Cluster, demand: Demand, offer: Offer | None, machine: Machine) -> Machine | None:
    """Return a worker with its memory beside ranks and rollout workers; None if its memory is unknown."""
    if offer is None or (machine.stands_for and not offer.accelerator_memory):
        return None
    if demand.on_gpu or demand.rollout is None or demand.rollout.workers is None:
        return machine
    bundle, workers = demand.resources.per_worker.bundle, demand.resources.workers
    beside = cluster.offer(bundle, workers.max + demand.rollout.workers.max)
    return replace(machine, memory=beside.memory) if beside else None

"""The planner of a run on its cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cluster.workers.cluster import Cluster
from cluster.workers.machine import Offer
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner import rollouts, teacher_workers
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.host_memory import check_workers_memory, state_bytes, worker_bytes
from orchestrator.planner.machines import machine_for, machine_notes
from orchestrator.planner.planner import Planner, may_fit, planned


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
        resumes: whether the run has a commit. What does not fit beside rollout or teacher workers is then a note.

    Returns:
        The planner, and what a user should know about the workers, one line each.

    Raises:
        InputError: the host memory of the workers cannot hold the training state that a commit saves, or a rollout
            or teacher worker of a new run does not fit.
    """
    bundle = demand.resources.per_worker.bundle
    has_others = demand.extra_workers is not None
    offer = cluster.offer(bundle, demand.shared_resources.workers.max)
    machine = machine_for(offer, bundle, demand.precision)
    notes = machine_notes(machine, demand.precision)
    if offer is not None and has_others and not (machine.stands_for and not offer.accelerator_memory):
        if not resumes:
            rollouts.check_rollout_workers(demand, shape, machine)
            teacher_workers.check_teacher_workers(demand, shape, machine)
        elif problem := (
            rollouts.memory_problem(demand, shape, machine)
            or teacher_workers.memory_problem(demand, shape, machine)
        ):
            notes.append(f"{problem}: it may run out of memory")
    if offer is not None and has_others and resumes and not _has_room(demand, shape, offer, machine):
        offer = cluster.offer(bundle, demand.resources.workers.max)
        machine = machine_for(offer, bundle, demand.precision)
        key = "rollout.workers" if demand.rollout else "distill.workers"
        notes.append(
            f"no layout fits beside {key}: one is chosen as if training workers had the memory of their nodes "
            "alone, and may run out of memory"
        )
    if offer is not None:
        check_workers_memory(demand.resources, _state_bytes(demand, shape), offer.memory)
    planner = Planner(
        demand,
        shape,
        machine,
        host=offer.memory if offer else None,
        confirm=partial(
            verdicts_before,
            job,
            machine,
            is_stopped,
            cluster.run_imported,
            row_tokens=shape.row_tokens,
        ),
        is_busy=is_busy,
    )
    return planner, notes


def _has_room(demand: Demand, shape: ModelShape, offer: Offer, machine: Machine) -> bool:
    """Whether training may fit on the largest number of workers: its layout, and the state that a commit saves."""
    most = demand.resources.workers.max
    if worker_bytes(demand.resources, _state_bytes(demand, shape), most) > offer.memory:
        return False
    plan = planned(demand, shape, most, machine, must_fit=False)
    return not demand.resources.must_fit or plan.fits or may_fit(plan)


def _state_bytes(demand: Demand, shape: ModelShape) -> float:
    return state_bytes(demand.optimizer, demand.ema, shape, pruned=demand.pruned)

"""Host memory of a run with GPUs: two generations of its state, from which commits are written."""

from __future__ import annotations

from cluster.workers.gang import workers_text
from orchestrator.checkpoint.config import GENERATIONS, SNAPSHOT_GENERATIONS
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.kinds import KINDS
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.simulation.update import kept_numbers

MUST_FIT_HINT = "must_fit: false runs it all the same"
SERVER_COPIES = 2 + 1
"""Copies of the state that the snapshot servers of all nodes hold together: the last whole snapshot, one that some
ranks have made, and one that arrives."""


def snapshot_bytes(state: float, workers: int) -> float:
    """Return the host memory that snapshots take for each of `workers` workers, besides what commits take.

    That is two more generations of a rank's own part, and the copies of other nodes' parts. `state` is that of
    `state_bytes`.

    Args:
        state: bytes over all ranks.
        workers: number of workers.
    """
    return (SNAPSHOT_GENERATIONS + SERVER_COPIES) * state / workers


def state_bytes(
    optimizer: OptimizerSpec,
    ema: float | None,
    shape: ModelShape,
    as_lower_bound: bool = False,
    pruned: float = 0.0,
) -> float:
    """Return the size of a checkpoint in bytes over all ranks, within 1 %.

    It counts fp32 weights, optimizer state and moving average of the trained parameters. A user's optimizer counts as
    AdamW; with `as_lower_bound` it counts as stateless. `pruned` adds `PruneSpec.bytes_per_parameter` for each of these
    parameters, although embeddings and norms are rarely pruned.

    Args:
        optimizer: the job's optimizer.
        ema: the decay of a moving average; None without one.
        shape: the sizes of the model.
        as_lower_bound: whether a user's optimizer counts as stateless.
        pruned: bytes of masks and scores for each parameter.
    """
    name = str(optimizer.name)
    numbers = 1.0 if as_lower_bound and name not in KINDS else 1.0 + kept_numbers(name, shape)
    numbers += 1.0 if ema is not None else 0.0
    return (4.0 * numbers + pruned) * shape.parameters * shape.trained_share


def worker_bytes(resources: ResourceSpec, state: float, workers: int) -> float:
    """Return the bytes that each of `workers` workers holds: the ranks divide the state evenly.

    0 without GPUs, or if the job says that it need not fit. `state` is that of `state_bytes`.

    Args:
        resources: of the workers.
        state: bytes over all ranks.
        workers: number of workers.
    """
    must_fit = resources.per_worker.gpu and resources.must_fit
    return GENERATIONS * state / workers if must_fit else 0.0


def check_workers_memory(resources: ResourceSpec, state: float, available: float) -> None:
    """Raise InputError unless the state fits in the host memory of as many workers as the job allows.

    Args:
        resources: of the workers.
        state: bytes over all ranks.
        available: bytes of host memory for each worker.
    """
    max_workers = resources.workers.max
    if (needed := worker_bytes(resources, state, max_workers)) > available:
        size = f"{needed / 1e9:.0f} GB of host memory for each of {workers_text(max_workers)}"
        problem = f"two copies of the run's state are {size}"
        hint = "take more workers, nodes with more memory, a smaller model, or fewer parameters by an adapter"
        problem += f", but the smallest node has {available / 1e9:.0f} GB for each"
        raise InputError(problem, "resources", f"{hint}; {MUST_FIT_HINT}")


def check_host_memory(resources: ResourceSpec, state: float, available: float) -> None:
    """Raise InputError unless the state fits in the memory of one machine on which all workers run.

    Args:
        resources: of the workers.
        state: bytes over all ranks.
        available: bytes of this machine.
    """
    if (needed := worker_bytes(resources, state, 1)) > available:
        problem = (
            f"two copies of the run's state are {needed / 1e9:.0f} GB of host memory, but this machine has"
        )
        hint = "train on more machines, which divide it, a smaller model, or fewer parameters by an adapter"
        raise InputError(f"{problem} {available / 1e9:.0f} GB", "resources", f"{hint}; {MUST_FIT_HINT}")

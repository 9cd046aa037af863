"""Host memory that a run with GPUs takes beside them: two generations of its state, which commits are written from."""

from __future__ import annotations

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.optim.kinds import KINDS
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.simulation.update import kept_numbers

FORCED = "must_fit: false runs it all the same"
GENERATIONS = 2
"""Copies of the state that a saver holds: one that is written, one that is filled."""


def state_bytes(spec: JobSpec, shape: ModelShape, least: bool = False) -> float:
    """The bytes of a commit within 1 %, over all ranks: weights, what the optimiser keeps and a moving average, all
    fp32. An optimiser of one's own is taken for AdamW, or at `least` for one that keeps nothing."""
    name = str(spec.train.optimizer.name)
    numbers = 1.0 if least and name not in KINDS else 1.0 + kept_numbers(name, shape)
    numbers += 1.0 if spec.checkpoint.ema is not None else 0.0
    return 4.0 * numbers * shape.parameters * shape.trained_share


def worker_bytes(spec: JobSpec, shape: ModelShape, workers: int) -> float:
    """What each of so many workers holds; the ranks of a run divide its state evenly. 0 where the job says that it
    need not fit."""
    asked = spec.resources.per_worker.gpu and spec.resources.must_fit
    return GENERATIONS * state_bytes(spec, shape) / workers if asked else 0.0


def check_workers_memory(spec: JobSpec, shape: ModelShape, there: float) -> None:
    """Raise InputError unless workers with so many bytes each hold what GPUs save, if there are as many as the job may
    have."""
    most = spec.resources.workers.max
    if (needed := worker_bytes(spec, shape, most)) > there:
        what = f"two copies of the run's state are {needed / 1e9:.0f} GB of host memory for each of {most} workers"
        hint = "take more workers, nodes with more memory, a smaller model, or fewer parameters by an adapter"
        what += f", and the smallest node has {there / 1e9:.0f} GB for each"
        raise InputError(what, "resources", f"{hint}; {FORCED}")


def check_host_memory(spec: JobSpec, shape: ModelShape, there: float) -> None:
    """Raise InputError unless a machine with so many bytes, on which all workers run, holds what GPUs save."""
    if (needed := worker_bytes(spec, shape, 1)) > there:
        what = f"two copies of the run's state are {needed / 1e9:.0f} GB of host memory, and this machine has"
        hint = "train on more machines, which divide it, a smaller model, or fewer parameters by an adapter"
        raise InputError(f"{what} {there / 1e9:.0f} GB", "resources", f"{hint}; {FORCED}")

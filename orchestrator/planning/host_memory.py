"""Host memory that a run with GPUs takes beside them: two generations of its state, which commits are written from."""

from __future__ import annotations

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec
from orchestrator.planning.layout import ModelShape

STATE, AVERAGE = 12.0, 4.0
"""Bytes of a snapshot for each parameter: weights and the two moments of Adam, all fp32; and of a moving average."""
GENERATIONS = 2
"""Copies of the state that a saver holds: one that is written, one that is filled."""


def state_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """The bytes of a commit, over all ranks."""
    each = STATE + (AVERAGE if spec.checkpoint.ema is not None else 0.0)
    return each * shape.parameters * shape.trained_share


def check_host_memory(spec: JobSpec, shape: ModelShape, there: float) -> None:
    """Raise InputError unless a machine with so many bytes, on which all workers run, holds what GPUs save."""
    needed = GENERATIONS * state_bytes(spec, shape)
    if spec.resources.per_worker.gpu and needed > there:
        what = f"two copies of the run's state are {needed / 1e9:.0f} GB of host memory, and this machine has"
        hint = "train on more machines, which divide it, a smaller model, or fewer parameters by an adapter"
        raise InputError(f"{what} {there / 1e9:.0f} GB", "resources", hint)

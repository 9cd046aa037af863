"""The learning rate schedule."""

from __future__ import annotations

import math

from orchestrator.job.spec import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 0) of `steps`: linear warm-up, then the schedule of the job."""
    if step < spec.warmup:
        return spec.lr * (step + 1) / spec.warmup
    done = (step - spec.warmup) / max(steps - spec.warmup, 1)
    if spec.schedule == "constant":
        return spec.lr
    shape = 0.5 * (1 + math.cos(math.pi * done)) if spec.schedule == "cosine" else 1.0 - done
    return spec.lr * (spec.final_lr + (1 - spec.final_lr) * shape)

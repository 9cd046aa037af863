"""The learning rate schedule."""

from __future__ import annotations

import math

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.optim.config import OptimizerSpec, in_steps
from workloads.errors import WorkloadError
from workloads.own.object_reference import load

WHERE = "train.optimizer.schedule"


def learning_rate(spec: OptimizerSpec, step: int, steps: int, begin: int = 0) -> float:
    """Return the learning rate of update `step` (from 0) of `steps`: linear warm-up, then the job's schedule.

    Updates count from `begin` on. A warm-up or decay that is a share is a share of all `steps`.

    wsd: warm-up, stable, decay (Hu et al. 2024, section 4), with a 1 - sqrt decay (Hägele et al. 2024, section 3).

    range_test: from lr * first_lr to lr in equal factors (Smith, 2017, section 3.3, where it rises in equal steps).

    inverse_sqrt: lr * sqrt(warmup / update), as in Vaswani et al. 2017, eq. 3, scaled so that the warm-up ends at lr.

    Args:
        spec: the job's optimizer.
        step: number of the update, from 0.
        steps: number of all updates of the run.
        begin: the update at which the schedule begins.
    """
    warmup = in_steps(spec.warmup, steps)
    decay = in_steps(spec.decay, steps)
    step = step - begin
    steps = steps - begin
    if step < warmup:
        # Never zero: the first update would change nothing and still count.
        return spec.lr * (step + 1) / warmup
    if isinstance(spec.schedule, ObjectReference):
        return spec.lr * own_share(spec.schedule, step, steps)
    decay_start = steps - decay
    # From 0 to just below 1: the last update still has a rate above the final one, which the run reaches as it ends.
    progress = (step - warmup) / max(steps - warmup, 1)
    match spec.schedule:
        case "constant":
            return spec.lr
        case "range_test":
            last = max(steps - warmup - 1, 1)
            return spec.lr * spec.first_lr ** (1.0 - min((step - warmup) / last, 1.0))
        case "inverse_sqrt":
            return spec.lr * math.sqrt(max(warmup, 1) / (step + 1))
        case "wsd" if step < decay_start:
            return spec.lr
        case "wsd":
            shape = 1.0 - math.sqrt((step - decay_start) / decay)
        case "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            shape = 1.0 - progress
    return spec.lr * (spec.final_lr + (1 - spec.final_lr) * shape)


def own_share(reference: ObjectReference, step: int, steps: int) -> float:
    """Return the learning rate of an update as a share of `lr`, by the user's own schedule.

    Raises InputError if the schedule fails or returns an invalid share.

    Args:
        reference: the user's schedule.
        step: number of the update, from 0.
        steps: number of all updates.

    Raises:
        InputError: the schedule fails, or returns an invalid share.
    """
    try:
        share = float(load(reference.use)(step, steps, **reference.options))
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{reference} failed at update {step} ({reason})", WHERE, "fix it") from None
    if not (math.isfinite(share) and share >= 0.0):
        raise InputError(
            f"{reference} gives {share} at update {step}", WHERE, "give a share of lr, 0 or more"
        )
    return share

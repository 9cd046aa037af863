"""The steps at which a run commits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError

if TYPE_CHECKING:  # The process that writes commits imports this module, but no job files.
    from orchestrator.checkpoint.config import CheckpointSpec
    from orchestrator.evaluate.config import EvaluateSpec
    from orchestrator.train.config import TrainSpec


def regular_before(step: int, every: int, count: int) -> Sequence[int]:
    """Return the `count` regular commit steps before `step`, newest first. Interruptions add further commits."""
    return range((step - 1) // every * every, 0, -every)[:count]


def check_best(checkpoint: CheckpointSpec, train: TrainSpec, evaluate: EvaluateSpec | None) -> None:
    """Check that the best checkpoint can be found: some evaluation before the last one must coincide with a commit.

    The job file itself does not have this rule, because the job files of started runs are read again and must not be
    refused.

    Args:
        checkpoint: the key `checkpoint` of the job.
        train: the key `train`.
        evaluate: the key `evaluate`; None without it.

    Raises:
        InputError: none coincides, although the job keeps the best checkpoint.
    """
    every = checkpoint.every
    steps = train.steps
    if checkpoint.best_metric is None or evaluate is None or evaluate.where == "beside":
        return
    meet = [math.lcm(evaluate.every, every), *train.thaw, train.decay_from or 0]
    meet += [step for step in evaluate.at if step % every == 0]
    if evaluate.every < steps and not any(0 < step < steps and evaluate.is_due(step, steps) for step in meet):
        problem = (
            f"no evaluation before the last falls on a checkpoint (evaluations every {evaluate.every} steps, "
            f"checkpoints every {every}), so the best would always be the last"
        )
        raise InputError(problem, "checkpoint.keep_best", f"set checkpoint.every to {evaluate.every}")

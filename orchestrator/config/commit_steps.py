"""At which steps a run commits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError

if TYPE_CHECKING:  # the process that writes commits imports this module and no job files
    from orchestrator.config.spec import JobSpec


def regular_before(step: int, every: int, count: int) -> Sequence[int]:
    """The steps of the `count` commits before `step` that are regular, every so many steps, newest first: interruptions
    add others."""
    return range((step - 1) // every * every, 0, -every)[:count]


def check_best(spec: JobSpec) -> None:
    """Raise InputError if the best commit by an evaluation is kept, and no evaluation before the end is of a commit. It
    is no rule of the job file, since those of runs that have begun are read again."""
    evaluate = spec.evaluate
    every = spec.checkpoint.every
    steps = spec.train.steps
    if spec.checkpoint.best_metric is None or evaluate is None or spec.evaluates_beside:
        return
    meet = [math.lcm(evaluate.every, every), *spec.train.thaw, spec.train.decay_from or 0]
    meet += [step for step in evaluate.at if step % every == 0]
    if evaluate.every < steps and not any(0 < step < steps and evaluate.is_due(step, steps) for step in meet):
        what = (
            f"would always be the last: evaluations are every {evaluate.every} steps, commits every {every}"
        )
        raise InputError(
            what, "checkpoint.keep_best", f"set checkpoint.every to {evaluate.every}, so that they meet"
        )

"""Rungs: the steps at which a trial reports and the scheduler decides whether it continues. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.optim.config import in_steps
from orchestrator.train.config import TrainSpec
from orchestrator.tune.config import POPULATION, TuneSpec

WARMUP = "train.optimizer.warmup"
OPTIMIZER = "train.optimizer"


def longest_warmup(tune: TuneSpec, train: TrainSpec) -> int:
    """Return the steps of the longest warm-up of any trial. Until then trials differ by how fast their rates rise."""
    values: list[Any] = [train.optimizer.warmup]
    for key, dimension in tune.space.items():
        candidates = dimension.listed or dimension.ends
        if key == WARMUP:
            values += candidates
        elif key == OPTIMIZER:
            values += [value.get("warmup", 0) for value in candidates if isinstance(value, Mapping)]
    return max(in_steps(value, train.steps) for value in values)


def grace_of(tune: TuneSpec, steps: int, warmup: int) -> int:
    """Return how many steps every trial is trained before the first decision, by default some after the `warmup`."""
    return tune.grace or warmup + math.ceil(steps / tune.reduction**2)


def early_decision(tune: TuneSpec, steps: int, warmup: int) -> str:
    """Return a line for the user if the first decision falls into the warm-up or behind the last step; else empty."""
    if tune.scheduler in ("asha", "median"):
        first = grace_of(tune, steps, warmup)
        remedy = f"leave tune.grace out, or set it above {warmup}"
    elif tune.scheduler == "hyperband":
        first = rungs(tune, steps, warmup)[0]
        remedy = "set tune.scheduler: asha, which waits for the end of the warm-up, or shorten the warm-up"
    else:
        return ""
    if first >= steps:
        problem = f"{tune.scheduler} stops no trial: its first decision after the warm-up of {warmup} steps is at step"
        return f"{problem} {first} of {steps}; shorten the warm-up, or train longer"
    if first > warmup:
        return ""
    problem = f"{tune.scheduler} compares trials at step {first}, within the warm-up of {warmup} steps"
    return f"{problem}, and so favours large learning rates; {remedy}"


def interval_of(tune: TuneSpec, steps: int) -> int:
    """Return the steps between two decisions, for schedulers that decide at even distances."""
    return tune.interval or max(1, steps // 10)


def rungs(tune: TuneSpec, steps: int, warmup: int) -> list[int]:
    """Return the steps at which a trial commits, stops its gang and reports, ascending, including the last step.

    - ASHA: the grace period times powers of the reduction.
    - HyperBand: the same for the first step of each bracket (Li et al., 2018, algorithm 1), as in Tune's scheduler.
    - PBT, PB2 and median stopping: even distances.

    The step of a promotion is a rung, too.

    Args:
        tune: the search.
        steps: optimizer steps of a whole trial.
        warmup: steps of the longest warm-up of any trial.
    """
    steps_of_rungs = {steps} | {promotion.at for promotion in tune.promote}
    if tune.scheduler == "asha":
        steps_of_rungs |= set(asha_rungs(tune, steps, warmup))
    elif tune.scheduler == "hyperband":
        for bracket in range(round(math.log(steps, tune.reduction)) + 1):
            steps_of_rungs |= _geometric(max(1, int(steps * tune.reduction**-bracket)), tune.reduction, steps)
    elif tune.scheduler in ("median", *POPULATION):
        every = interval_of(tune, steps)
        steps_of_rungs |= set(range(every, steps, every))
        if tune.scheduler == "median":
            steps_of_rungs.add(grace_of(tune, steps, warmup))
    return sorted(step for step in steps_of_rungs if step <= steps)


def asha_rungs(tune: TuneSpec, steps: int, warmup: int) -> list[int]:
    """Return the rungs at which ASHA decides, ascending, including the last step."""
    return sorted(_geometric(grace_of(tune, steps, warmup), tune.reduction, steps) | {steps})


def _geometric(first: int, ratio: int, end: int) -> set[int]:
    steps = set()
    step = first
    while step < end:
        steps.add(step)
        step *= ratio
    return steps

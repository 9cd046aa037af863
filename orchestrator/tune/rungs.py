"""Rungs: the steps at which a trial reports and the scheduler decides whether it continues. Pure."""

from __future__ import annotations

import math

from orchestrator.tune.config import POPULATION, TuneSpec


def grace_of(tune: TuneSpec, steps: int) -> int:
    """Return how many steps every trial is trained before the first decision."""
    return tune.grace or math.ceil(steps / tune.reduction**2)


def interval_of(tune: TuneSpec, steps: int) -> int:
    """Return the steps between two decisions, for schedulers that decide at even distances."""
    return tune.interval or max(1, steps // 10)


def rungs(tune: TuneSpec, steps: int) -> list[int]:
    """Return the steps at which a trial commits, stops its gang and reports, ascending, including the last step.

    - ASHA: the grace period times powers of the reduction.
    - HyperBand: the same for the first step of each bracket (Li et al., 2018, algorithm 1), as in Tune's scheduler.
    - PBT, PB2 and median stopping: even distances.

    The step of a promotion is a rung, too.
    """
    steps_of_rungs = {steps} | {promotion.at for promotion in tune.promote}
    if tune.scheduler == "asha":
        steps_of_rungs |= set(asha_rungs(tune, steps))
    elif tune.scheduler == "hyperband":
        for bracket in range(round(math.log(steps, tune.reduction)) + 1):
            steps_of_rungs |= _geometric(max(1, int(steps * tune.reduction**-bracket)), tune.reduction, steps)
    elif tune.scheduler in ("median", *POPULATION):
        every = interval_of(tune, steps)
        steps_of_rungs |= set(range(every, steps, every))
        if tune.scheduler == "median":
            steps_of_rungs.add(grace_of(tune, steps))
    return sorted(step for step in steps_of_rungs if step <= steps)


def asha_rungs(tune: TuneSpec, steps: int) -> list[int]:
    """Return the rungs at which ASHA decides, ascending, including the last step."""
    return sorted(_geometric(grace_of(tune, steps), tune.reduction, steps) | {steps})


def _geometric(first: int, ratio: int, end: int) -> set[int]:
    steps = set()
    step = first
    while step < end:
        steps.add(step)
        step *= ratio
    return steps

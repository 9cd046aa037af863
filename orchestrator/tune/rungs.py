"""Rungs: the steps at which a trial reports and it is decided whether it continues. Pure."""

from __future__ import annotations

import math

from orchestrator.config.tune import POPULATION, TuneSpec


def grace_of(tune: TuneSpec, steps: int) -> int:
    """Steps that every trial is trained before the first decision."""
    return tune.grace or math.ceil(steps / tune.reduction**2)


def interval_of(tune: TuneSpec, steps: int) -> int:
    """Steps between two decisions, for schedulers that decide at even distances."""
    return tune.interval or max(1, steps // 10)


def rungs(tune: TuneSpec, steps: int) -> list[int]:
    """Steps at which a trial commits, stops its gang and reports; ascending, the last step of training included.

    ASHA: grace times powers of the reduction; HyperBand: the same for the first step of each bracket (Li et al., 2018,
    algorithm 1), as Tune's own scheduler has them; PBT, PB2 and median stopping: even distances. The step of a
    promotion is a rung too.
    """
    found = {steps} | {promotion.at for promotion in tune.promote}
    if tune.scheduler == "asha":
        found |= set(asha_rungs(tune, steps))
    elif tune.scheduler == "hyperband":
        for bracket in range(round(math.log(steps, tune.reduction)) + 1):
            found |= _geometric(max(1, int(steps * tune.reduction**-bracket)), tune.reduction, steps)
    elif tune.scheduler in ("median", *POPULATION):
        every = interval_of(tune, steps)
        found |= set(range(every, steps, every))
        found |= {grace_of(tune, steps)} if tune.scheduler == "median" else set()
    return sorted(step for step in found if step <= steps)


def asha_rungs(tune: TuneSpec, steps: int) -> list[int]:
    """The rungs at which ASHA decides, ascending, the last step included."""
    return sorted(_geometric(grace_of(tune, steps), tune.reduction, steps) | {steps})


def _geometric(first: int, ratio: int, end: int) -> set[int]:
    found, at = set(), first
    while at < end:
        found.add(at)
        at *= ratio
    return found

"""The runs of a trial: its own, and after each exploit a new one that begins with another trial's commit."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.checkpoint.copying import copy
from orchestrator.checkpoint.store import Store
from orchestrator.record import METRICS, by_step
from orchestrator.rundir import Row, RunDir
from orchestrator.tune.space import Config

ORIGIN = "origin.json"
"""In the run after an exploit, written last: {run, step, config}, where its first commit is from."""
RUN = re.compile(r"(\d{4,})(?:-(\d+))?")


def trial_of(run: str) -> str:
    """The trial that a run is of."""
    return run.split("-")[0]


def runs_of(sweep: RunDir, trial: str) -> list[str]:
    """The names of a trial's runs, oldest first; the first may not have begun."""
    found = [trial]
    while at(sweep, following := f"{trial}-{len(found)}").exists(ORIGIN):
        found.append(following)
    return found


def at(sweep: RunDir, run: str) -> RunDir:
    """The directory of a run."""
    return RunDir(sweep.at(run))


def origin(sweep: RunDir, run: str) -> dict[str, Any] | None:
    """Where a run's first commit is from, None if it began by itself."""
    found = at(sweep, run).read_json(ORIGIN)
    return dict(found) if found else None


def config_of(sweep: RunDir, trial: str, drawn: Config) -> Config:
    """The values of a trial: those of its last exploit, or else as they were drawn."""
    begun = origin(sweep, runs_of(sweep, trial)[-1])
    return dict(begun["config"]) if begun else drawn


def exploit(sweep: RunDir, trial: str, donor: str, step: int, config: Config) -> str:
    """A new run of the trial that begins with the donor's commit at `step`; its name.

    Where the donor no longer keeps that commit, it is the oldest one after it. Doing so again changes nothing.
    """
    runs = runs_of(sweep, trial)
    last = origin(sweep, runs[-1])
    if last and (last["donor"], last["asked"], last["config"]) == (donor, step, config):
        return runs[-1]
    name = f"{trial}-{len(runs)}"
    run = at(sweep, name)
    run.create()
    source = Store(at(sweep, donor).at("checkpoints"))
    taken = min(found for found in source.steps() if found >= step)
    copy(source, taken, Store(run.at("checkpoints")))
    run.write_json(ORIGIN, {"donor": donor, "asked": step, "step": taken, "config": config})
    return name


def history(sweep: RunDir, run: str) -> list[Row]:
    """A row a step of what led to the weights of a run: its own, and before its first commit the donor's."""
    rows = by_step(at(sweep, run).rows(METRICS))
    begun = origin(sweep, run)
    if begun is None:
        return rows
    before = [row for row in history(sweep, begun["donor"]) if row["step"] <= begun["step"]]
    return before + [row for row in rows if row["step"] > begun["step"]]


def own_steps(sweep: RunDir, run: str, step: int) -> int:
    """Optimiser steps done for the sake of a run that stands at `step`."""
    begun = origin(sweep, run)
    return step - (begun["step"] if begun else 0)

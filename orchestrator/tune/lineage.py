"""The runs of a trial: its first one, and after each exploit (PBT) a new one that starts from another trial's commit.

A run that starts so has a file origin.json that names the donor run and the step of the commit taken from it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import yaml

from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.identity import IDENTITY, read_job
from orchestrator.checkpoint.retention import rewind
from orchestrator.checkpoint.store import Store
from orchestrator.config.spec import parse
from orchestrator.controller.run_history import RECENT
from orchestrator.observe.goodput import timeline
from orchestrator.observe.summary import cost
from orchestrator.observe.totals import tally
from orchestrator.storage.row_line import EVENTS, METRICS, Row
from orchestrator.storage.run_directory import ORIGIN, RunDir
from orchestrator.tune.space import Config, job_of

RUN = re.compile(r"(\d{4,})(?:-(\d+))?")


def trial_of(run: str) -> str:
    """The trial that a run belongs to: 0003 for the run 0003-1."""
    return run.split("-")[0]


def runs_of(sweep: RunDir, trial: str) -> list[str]:
    """The names of a trial's runs, oldest first; the first may not have started yet."""
    found = [trial]
    while at(sweep, following := f"{trial}-{len(found)}").exists(ORIGIN):
        found.append(following)
    return found


def at(sweep: RunDir, run: str) -> RunDir:
    """The run directory of a run of the search."""
    return RunDir(sweep.at(run))


def origin(sweep: RunDir, run: str) -> dict[str, Any] | None:
    """The origin of a run that started from another run's commit: {donor, asked, step, config}; None for any other."""
    found = at(sweep, run).read_json(ORIGIN)
    return dict(found) if found else None


def config_of(sweep: RunDir, trial: str, drawn: Config) -> Config:
    """The current values of a trial: those of its last exploit, or `drawn` if there was none."""
    begun = origin(sweep, runs_of(sweep, trial)[-1])
    return dict(begun["config"]) if begun else drawn


def exploit(sweep: RunDir, trial: str, donor: str, step: int, config: Config) -> str:
    """Create a run of the trial that starts from the donor run's commit at `step`, and return its name.

    If the donor no longer has that commit, the oldest later one is taken. A repeated call changes nothing.
    """
    runs = runs_of(sweep, trial)
    last = origin(sweep, runs[-1])
    if last and (last["donor"], last["asked"], last["config"]) == (donor, step, config):
        return runs[-1]
    name = f"{trial}-{len(runs)}"
    run = at(sweep, name)
    run.create()
    source = Store(at(sweep, donor).commits)
    taken = min(found for found in source.steps() if found >= step)
    base = read_job(sweep)
    own = {IDENTITY: job_of(base, config).identity()} if base else {}
    target = Store(run.commits)
    rewind(target, -1)  # a copy that was interrupted, maybe of another commit
    copy_commit(source, taken, target, {"attempt": 0, **own})
    run.write_json(ORIGIN, {"donor": donor, "asked": step, "step": taken, "config": config})
    return name


def history(sweep: RunDir, run: str) -> list[Row]:
    """Metrics rows of all steps behind a run's weights, ascending: its own, and the donor's before the commit taken."""
    return list(_newest(sweep, run))[::-1]


def latest(sweep: RunDir, run: str, step: int, count: int) -> list[Row]:
    """The last `count` rows of `history` up to `step`, ascending. Files are read from their end on."""
    before = itertools.dropwhile(lambda row: row["step"] > step, _newest(sweep, run))
    return list(itertools.islice(before, count))[::-1]


def _newest(sweep: RunDir, run: str) -> Iterator[Row]:
    begun = origin(sweep, run)
    first = begun["step"] if begun else 0
    rows = at(sweep, run).log(METRICS).newest()
    yield from itertools.takewhile(lambda row: row["step"] > first, rows)
    if begun is not None:
        yield from itertools.dropwhile(lambda row: row["step"] > first, _newest(sweep, begun["donor"]))


def own_steps(sweep: RunDir, run: str, step: int) -> int:
    """Optimiser steps that a run at `step` has computed itself, without those of its donor."""
    begun = origin(sweep, run)
    return max(step - (begun["step"] if begun else 0), 0)


def spent(sweep: RunDir, run: str) -> tuple[int, float]:
    """Optimiser steps computed and USD spent by a run so far, from the rows in its directory."""
    directory = at(sweep, run)
    text = directory.read_text("job.yaml")
    last = next(directory.log(METRICS).newest(), None)
    if text is None or last is None:
        return 0, 0.0
    spec = parse(yaml.safe_load(text), directory.at("job.yaml"))
    events = directory.rows(EVENTS)
    rows = tally(events, itertools.islice(directory.log(METRICS).newest(), RECENT))
    usd = cost(timeline(events, rows), rows, events, spec.limits.usd_per_worker_hour)
    return own_steps(sweep, run, last["step"]), usd or 0.0

"""The runs of a trial: its first run, and a new run after each exploit (PBT), which starts from another trial's commit.

Such a run has a file origin.json, which names the donor run and the step of its commit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import yaml

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.identity import IDENTITY, read_job
from orchestrator.checkpoint.retention import rewind
from orchestrator.config.spec import parse
from orchestrator.controller.run_files import RECENT
from orchestrator.observe.goodput import timeline
from orchestrator.observe.summary import cost
from orchestrator.observe.totals import tally
from orchestrator.storage.row_line import EVENTS, METRICS, Row
from orchestrator.storage.run_directory import ORIGIN, RunDir
from orchestrator.tune.space import Config, job_of

RUN = re.compile(r"(\d{4,})(?:-(\d+))?")
"""The name of a run: the trial, and the number of its exploit."""


def trial_of(run: str) -> str:
    """Return the trial that a run belongs to: 0003 for the run 0003-1."""
    return run.split("-")[0]


def runs_of(sweep: RunDir, trial: str) -> list[str]:
    """Return the names of a trial's runs, oldest first. The first may not have started yet."""
    runs = [trial]
    while at(sweep, following := f"{trial}-{len(runs)}").exists(ORIGIN):
        runs.append(following)
    return runs


def at(sweep: RunDir, run: str) -> RunDir:
    """Return the directory of a run of the search."""
    return RunDir(sweep.at(run))


def origin(sweep: RunDir, run: str) -> dict[str, Any] | None:
    """Return {donor, asked, step, config} of a run that started from another run's commit; None for other runs."""
    stored = at(sweep, run).read_json(ORIGIN)
    return dict(stored) if stored else None


def config_of(sweep: RunDir, trial: str, drawn: Config) -> Config:
    """Return the current values of a trial: those of its last exploit, or `drawn` before the first."""
    begun = origin(sweep, runs_of(sweep, trial)[-1])
    return dict(begun["config"]) if begun else drawn


def exploit(sweep: RunDir, trial: str, donor: str, step: int, config: Config) -> str:
    """Create a run of the trial that starts from another run's commit, and return its name.

    A repeated call changes nothing.

    Args:
        sweep: the directory of the search.
        trial: the trial.
        donor: the run to take the commit from.
        step: the step of the commit. If it has been removed, the oldest later commit is taken.
        config: the new values of the trial.
    """
    runs = runs_of(sweep, trial)
    last = origin(sweep, runs[-1])
    if last and (last["donor"], last["asked"], last["config"]) == (donor, step, config):
        return runs[-1]
    name = f"{trial}-{len(runs)}"
    run = at(sweep, name)
    run.create()
    source = Store(at(sweep, donor).commits)
    taken = min(commit_step for commit_step in source.steps() if commit_step >= step)
    base = read_job(sweep)
    identity_entry = {IDENTITY: job_of(base, config).identity()} if base else {}
    target = Store(run.commits)
    rewind(target, -1)  # removes an interrupted copy, which may be of another commit
    copy_commit(source, taken, target, {"attempt": 0, **identity_entry})
    run.write_json(ORIGIN, {"donor": donor, "asked": step, "step": taken, "config": config})
    return name


def history(sweep: RunDir, run: str) -> list[Row]:
    """Return the metrics rows of all steps behind a run's weights: the donor's up to its commit, then the run's own."""
    return list(_newest(sweep, run))[::-1]


def latest(sweep: RunDir, run: str, step: int, count: int) -> list[Row]:
    """Return the last `count` rows of `history` up to `step`, ascending. Reads files from their end."""
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
    """Return how many optimizer steps a run at `step` has computed itself, without its donor's."""
    begun = origin(sweep, run)
    return max(step - (begun["step"] if begun else 0), 0)


def spent(sweep: RunDir, run: str) -> tuple[int, float]:
    """Return the optimizer steps and USD of a run so far, from the rows in its directory."""
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

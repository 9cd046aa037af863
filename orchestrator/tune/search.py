"""A search from the outside: check it, draw its trials, have Ray Tune drive them, and say which was best."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.identity import job_in
from orchestrator.data.quiet_logging import hushed
from orchestrator.job.errors import InputError
from orchestrator.job.outcome import Outcome
from orchestrator.job.spec import JobSpec, dump
from orchestrator.job.tune import POPULATION, TuneSpec
from orchestrator.launch.run import check, check_labels
from orchestrator.launch.submission import no_cluster
from orchestrator.resolve import parts as assemble
from orchestrator.storage.run_directory import RunDir, remove_empty
from orchestrator.tune.lineage import config_of
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.space import Config, drawn, grid, job_of
from orchestrator.tune.space import check as check_space
from orchestrator.tune.trial_records import TrialRecords

SAME = ("space", "metric", "mode", "window", "sampler", "scheduler", "grace", "reduction", "interval")
"""What of a search stays as it was when the same command goes on; trials, limits and layouts may change."""
BEST_JOB, SUMMARY = "best.yaml", "sweep.json"
TUNE_FOLDER = "_tune"
"""Ray Tune's own files; nothing is read from them."""
HEAD, HEAD_SHARE = "node:__internal_head__", 0.99
"""Trials are driven on the head, as other runs are; their shares of what only it has bound how many are at once."""


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended, what stands in sweep.json, and a line for the user."""

    outcome: Outcome
    summary: dict[str, Any]
    line: str = ""


def tune(
    spec: JobSpec, sweep: RunDir, address: str | None, show: Callable[[dict[str, Any]], None]
) -> SearchOutcome:
    """Search, or go on with a search from what is on record. `show` gets a `SearchProgress` as JSON when it changes.

    Raises InputError before anything is written if the job or its search is wrong, or it is another search.
    """
    search = check_space(spec)
    first = grid(search)[0] if search.sampler == "grid" else drawn(search, spec.seed, 0)
    check(job_of(spec, first))
    check_labels(spec, address)
    check_same_sweep(spec, sweep)
    made = sweep.create()
    from cluster.local.ray_session import NoCluster, ray_at

    workers, worker = spec.resources.workers, spec.resources.per_worker
    at_once = search.concurrency or 1
    try:
        with ray_at(address, at_once * workers.max * worker.cpu, at_once * workers.max * worker.gpu):
            with sweep.lock():
                sweep.write_text("job.yaml", dump(spec))
                return _search(spec, search, sweep, show)
    except NoCluster as error:
        raise no_cluster(error, address) from None
    finally:
        remove_empty(made)


def check_same_sweep(spec: JobSpec, sweep: RunDir) -> None:
    """Refuse to go on with another search's directory, or with a run's. Raises InputError."""
    before = job_in(sweep)
    if before is None:
        return
    assert spec.tune is not None
    hint = "set it back, or give another name or --run-dir"
    if before.tune is None or sweep.exists("events.jsonl"):
        raise InputError("a run is here, and no search", sweep.uri, "give another name or --run-dir")
    for key in SAME:
        if getattr(spec.tune, key) != getattr(before.tune, key):
            raise InputError(f"tune.{key} is not what this search began with", sweep.uri, hint)
    if spec.identity() != before.identity():
        raise InputError("this search began with another job", sweep.uri, hint)


def _search(
    spec: JobSpec, search: TuneSpec, sweep: RunDir, show: Callable[[dict[str, Any]], None]
) -> SearchOutcome:
    from orchestrator.tune.ending import finish

    ledger = TrialRecords(sweep)
    wanted = len(grid(search)) if search.sampler == "grid" else search.trials or 0
    if search.sampler == "grid":
        ledger.draw(grid(search)[len(ledger.configs) :])
    elif search.sampler == "random":
        ledger.draw(drawn(search, spec.seed, n) for n in range(len(ledger.configs), wanted))
    before = sweep.read_json(SUMMARY) or {}
    standing = SearchProgress(spec, sweep, ledger, wanted, before.get("hours") or 0.0, show)
    if len(ledger.ended) < wanted and not standing.limit():
        _prepare(spec, sweep, show)
        _fit(spec, search, sweep, ledger, standing, wanted)
    found = finish(spec, sweep, ledger, standing)
    if len(ledger.ended) < wanted:
        line = standing.limit() or "interrupted"
        return SearchOutcome(Outcome.STOPPED, found, f"{line}; the same command goes on")
    if found["best"] is None:
        reason = next(iter(ledger.ended.values())).reason
        return SearchOutcome(Outcome.FAILED, found, f"every trial failed; the first: {reason}")
    return SearchOutcome(Outcome.DONE, found)


def _prepare(spec: JobSpec, sweep: RunDir, show: Callable[[dict[str, Any]], None]) -> None:
    """Make the token shards once, before trials would each begin to; a search over data has more than these."""
    assemble.prepare(
        spec, sweep, lambda what, done, total: show({"note": f"preparing {what}: {done} of {total} parts"})
    )


def _fit(
    spec: JobSpec,
    search: TuneSpec,
    sweep: RunDir,
    ledger: TrialRecords,
    standing: SearchProgress,
    wanted: int,
) -> None:
    """Have Ray Tune drive what has not ended."""
    # Else Tune writes its results in three more formats, and tables to standard output.
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    from ray import tune as ray_tune
    from ray.tune import FailureConfig, RunConfig, TuneConfig, Tuner

    from orchestrator.tune.ending import remove_folder
    from orchestrator.tune.ray_callbacks import LimitStopper, TrialCallback
    from orchestrator.tune.schedulers import Tpe, scheduler_of
    from orchestrator.tune.trial import VALUE, Trial

    names = [name for name in ledger.configs if not _needs_no_telling(name, search, ledger)]
    deadline = standing.deadline()

    def given(name: str, config: Config) -> dict[str, Any]:
        ended = ledger.ended.get(name)
        told = {"sweep": sweep.uri, "trial": name, "params": config, "deadline": deadline}
        return told | {"ended": ended.step if ended else None}

    at_once = min(search.concurrency or _room(spec), wanted)
    searcher: Any = None
    space: dict[str, Any] = {}
    if search.sampler == "tpe":
        searcher = Tpe(search, spec.seed, ledger, list(names), given)
        samples = wanted - (len(ledger.configs) - len(names))
    else:
        points = [given(name, config_of(sweep, name, ledger.configs[name])) for name in names]
        space, samples = {"given": ray_tune.grid_search(points)}, 1
    # A scheduler that pauses wants all trials to be alive, and only so many at work.
    pausing = search.scheduler in (*POPULATION, "asha", "hyperband")
    tuner = Tuner(
        ray_tune.with_resources(Trial, ray_tune.PlacementGroupFactory([{HEAD: _share(at_once)}])),
        param_space=space,
        tune_config=TuneConfig(
            metric=VALUE,
            mode=search.mode,
            num_samples=samples,
            max_concurrent_trials=None if pausing else at_once,
            search_alg=searcher,
            scheduler=scheduler_of(search, spec.train.steps, spec.seed),
            reuse_actors=True,
        ),
        run_config=RunConfig(
            name=f"{int(time.time())}",
            storage_path=sweep.at(TUNE_FOLDER),
            callbacks=[TrialCallback(standing)],
            stop=LimitStopper(standing),
            failure_config=FailureConfig(max_failures=2),
            verbose=0,
        ),
    )
    # Tune logs what `show` says better.
    with hushed([logging.getLogger(name) for name in ("ray.tune", "ray.air", "ray.train")], logging.CRITICAL):
        tuner.fit()
    remove_folder(sweep, TUNE_FOLDER)


def _needs_no_telling(name: str, search: TuneSpec, ledger: TrialRecords) -> bool:
    """Whether neither scheduler nor sampler learn anything from a trial that has ended."""
    ended = ledger.ended.get(name)
    if ended is None:
        return False
    return ended.state == "failed" or (search.sampler != "tpe" and search.scheduler in ("none", *POPULATION))


def _room(spec: JobSpec) -> int:
    """How many gangs of the largest size the cluster has room for, at least one."""
    from cluster.workers import nodes

    bundle = spec.resources.per_worker.bundle
    there = sum(nodes.room(node.total, node.labels, bundle) for node in nodes.alive())
    return max(1, there // spec.resources.workers.max)


def _share(at_once: int) -> float:
    return max(int(HEAD_SHARE / at_once * 10_000) / 10_000, 0.0001)

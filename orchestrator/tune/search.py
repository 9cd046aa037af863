"""Run a search: check it, draw its trials, let Ray Tune drive them, and write the results."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from cluster.workers.environment import put_back
from orchestrator.checkpoint.identity import check_same_sets, differences, is_other, read_job, shown
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import holds_secret, redact_message
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, dump
from orchestrator.data.progress import StageLine
from orchestrator.data.quiet_logging import quiet
from orchestrator.launch.active_controller import refuse_if_at_work
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.machine_checks import check_labels
from orchestrator.launch.own_sources import make_own_sources
from orchestrator.launch.path_checks import check_all_places, check_written
from orchestrator.launch.submission import on_cluster
from orchestrator.launch.worker import worker_at
from orchestrator.planner.precision import in_precision
from orchestrator.resolve import prepared_data
from orchestrator.resolve.precision import as_its_run
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir, remove_empty
from orchestrator.train.config import TrainSpec
from orchestrator.tune import lineage
from orchestrator.tune.config import POPULATION, TuneSpec
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.rungs import early_decision, longest_warmup
from orchestrator.tune.same_inputs import check_same_inputs, measured_otherwise
from orchestrator.tune.space import Config, drawn, grid, job_of
from orchestrator.tune.space import check as check_space
from orchestrator.tune.trial_records import TrialRecords
from workloads.own.object_reference import is_object_reference

SAME = ("space", "metric", "window", "sampler", "scheduler", "grace", "reduction", "interval")
"""Keys of `tune` that must not change when a search is continued; trials, limits and layouts may."""
BEST_JOB = "best.yaml"
SUMMARY = "sweep.json"
TUNE_FOLDER = "_tune"
"""The folder of Ray Tune's own files. Nothing is read from it, and it is removed at the end."""
TUNE_HEEDS = "TUNE_DISABLE_SIGINT_HANDLER"
"""The variable that keeps Tune from handling SIGINT."""
TUNE_ENDS = signal.SIGUSR1
"""The signal that Tune always handles as it handles SIGINT."""
HEAD = "node:__internal_head__"
"""A resource that only the head node has. Trials are driven there, as other runs are."""
HEAD_SHARE = 0.99
"""The amount of it that all trials share, which limits how many run in parallel."""


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended, the content of sweep.json, and a line for the user."""

    outcome: Outcome
    summary: dict[str, Any]
    line: str = ""


def tune(
    spec: JobSpec, sweep: RunDir, address: str | None, show: Callable[[dict[str, Any]], None]
) -> SearchOutcome:
    """Run a search, or continue one from its records.

    Args:
        spec: the job with its search.
        sweep: the directory of the search.
        address: the cluster to run on, None to start Ray on this machine.
        show: gets `SearchProgress.to_json()` when it changes.

    Raises:
        InputError: the job or its search is wrong, or the directory belongs to another. Nothing is written in that
        case.
    """
    spec = spec.with_parts(train=as_its_run(spec.train, sweep))
    search = check_space(spec)
    check_all_places(spec, sweep)
    check_written(spec.checkpoint, spec.data, sweep, address)
    refuse_if_at_work(sweep, *_at_work(sweep))
    make_own_sources(spec.data, address, partial(print, file=sys.stderr))
    first = grid(search)[0] if search.sampler == "grid" else drawn(search, spec.seed, 0)
    job = check_job(_as_registered(spec, job_of(spec, first)), machine_of=worker_at(address))
    if spec.train.precision == "auto":  # once, so that no trial differs from others in it
        spec = spec.with_parts(train=in_precision(spec.train, job.spec.train.dtype))
    check_labels(spec.resources, address)
    check_same_sweep(spec, sweep)
    made = sweep.create()
    workers, worker = spec.resources.workers, spec.resources.per_worker
    at_once = search.concurrency or 1
    try:
        with on_cluster(address, at_once * workers.max * worker.cpu, at_once * workers.max * worker.gpu):
            with sweep.lock():
                sweep.write_text("job.yaml", text := dump(spec), private=holds_secret(text))
                return _search(spec, search, sweep, show)
    finally:
        remove_empty(made)


def _as_registered(spec: JobSpec, trial: JobSpec) -> JobSpec:
    """Return the job of a trial for the checks. It has an export if the best model is to be registered."""
    if spec.tune is None or spec.tune.register_as is None or trial.checkpoint.export:
        return trial
    form = "safetensors" if is_object_reference(trial.workload.model) else "hf"
    return trial.model_copy(update={"checkpoint": trial.checkpoint.model_copy(update={"export": form})})


def _at_work(sweep: RunDir) -> list[RunDir]:
    """Return the runs of the trials that have not ended. Running ones keep their status up to date."""
    rows = sweep.rows(TRIALS)
    ended = {row["trial"] for row in rows if row["event"] == "ended"}
    names = [row["trial"] for row in rows if row["event"] == "drawn" and row["trial"] not in ended]
    return [lineage.at(sweep, lineage.runs_of(sweep, name)[-1]) for name in names]


def check_same_sweep(spec: JobSpec, sweep: RunDir) -> None:
    """Raise InputError if the directory holds a run, or a search that differs from this one. It names every key.

    A search differs by its job, by the keys SAME of `tune`, or by how its values are measured.
    """
    before = read_job(sweep)
    if before is None:
        return
    assert spec.tune is not None
    hint = "set it back, or give another name or --run-dir"
    if before.tune is None or sweep.exists("events.jsonl"):
        raise InputError("this is a run, not a search", sweep.uri, "give another name or --run-dir")
    problems = Problems()
    ours, theirs = (each.model_dump(mode="json", include=set(SAME)) for each in (spec.tune, before.tune))
    ours["mode"], theirs["mode"] = spec.tune.direction, before.tune.direction
    for key in ours:
        if is_other(theirs[key], ours[key]):
            with problems.noted():
                raise InputError(f"tune.{key} is not what this search began with", sweep.uri, hint)
    for key, was, now in (
        *differences(spec.identity(), before.identity()),
        *measured_otherwise(spec, before),
    ):
        with problems.noted():
            what = f"{key} is {shown(was)} in this search and {shown(now)} in the job file"
            raise InputError(what, sweep.uri, hint)
    with problems.noted():
        check_same_sets(spec.set_sources, before.set_sources)
    problems.raise_noted()


def _search(
    spec: JobSpec, search: TuneSpec, sweep: RunDir, show: Callable[[dict[str, Any]], None]
) -> SearchOutcome:
    from orchestrator.tune.mlflow_search import LiveSearch
    from orchestrator.tune.results import finish

    records = TrialRecords(sweep)
    records.begin()
    wanted = len(grid(search)) if search.sampler == "grid" else search.trials or 0
    if search.sampler == "grid":
        records.draw(grid(search)[len(records.configs) :])
    elif search.sampler == "random":
        records.draw(drawn(search, spec.seed, n) for n in range(len(records.configs), wanted))
    before = sweep.read_json(SUMMARY) or {}
    live = LiveSearch(spec.name, spec.tracking, spec.tune, sweep, records)

    def tell(news: dict[str, Any]) -> None:
        live.tell(news)
        show(news)

    progress = SearchProgress(
        spec.tune,
        spec.train.steps,
        sweep=sweep,
        records=records,
        wanted=wanted,
        hours=before.get("hours") or 0.0,
        show=tell,
    )
    if line := early_decision(search, spec.train.steps, longest_warmup(search, spec.train)):
        show({"warning": line})
    if len(records.ended) < wanted and not progress.limit():
        with live.follower() if spec.tracking else contextlib.nullcontext():
            _prepare(spec, sweep, show)
            _fit(
                spec.train,
                spec.resources,
                spec.seed,
                search,
                sweep=sweep,
                records=records,
                progress=progress,
                wanted=wanted,
            )
    found = finish(spec, sweep, records, progress)
    if len(records.ended) < wanted:
        line = progress.limit() or "interrupted"
        return SearchOutcome(Outcome.STOPPED, found, f"{line}; the same command continues")
    if found["best"] is None:
        reason = next(iter(records.ended.values())).reason
        return SearchOutcome(
            Outcome.FAILED, found, redact_message(f"every trial failed; the first: {reason}")
        )
    return SearchOutcome(Outcome.DONE, found)


def _prepare(spec: JobSpec, sweep: RunDir, show: Callable[[dict[str, Any]], None]) -> None:
    """Prepare the token shards once, before all trials. A trial with other data keys prepares its own.

    Raises InputError if they differ from those of the trials so far.
    """
    line = StageLine(lambda text: show({"note": f"preparing {text}"}))
    check_same_inputs(spec, sweep, prepared_data.prepared(spec, sweep, prepared_data.PreparedData(), line))


def _fit(
    train: TrainSpec,
    resources: ResourceSpec,
    seed: int,
    search: TuneSpec,
    sweep: RunDir,
    records: TrialRecords,
    progress: SearchProgress,
    wanted: int,
) -> None:
    """Let Ray Tune drive the trials that have not ended."""
    # Otherwise Tune writes its results in three more formats, and tables to standard output.
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    from ray import tune as ray_tune
    from ray.tune import FailureConfig, RunConfig, TuneConfig, Tuner

    from orchestrator.tune.ray_callbacks import LimitStopper, TrialCallback
    from orchestrator.tune.results import remove_folder
    from orchestrator.tune.schedulers import Tpe, scheduler_of
    from orchestrator.tune.trial import VALUE, Trial

    names = [name for name in records.configs if not _is_settled(name, search, records)]
    deadline = progress.deadline()

    def assignment_of(name: str, config: Config) -> dict[str, Any]:
        end = records.ended.get(name)
        known = {"sweep": sweep.uri, "trial": name, "params": config, "deadline": deadline}
        return known | {"ended": end.step if end else None}

    at_once = min(search.concurrency or _capacity(resources), wanted)
    searcher: Any = None
    space: dict[str, Any] = {}
    if search.sampler == "tpe":
        searcher = Tpe(search, seed, records, list(names), assignment_of)
        samples = wanted - (len(records.configs) - len(names))
    else:
        points = [
            assignment_of(name, lineage.config_of(sweep, name, records.configs[name])) for name in names
        ]
        space, samples = {"assignment": ray_tune.grid_search(points)}, 1
    # A scheduler that pauses trials needs all of them to exist; their shares limit how many run in parallel.
    pausing = search.scheduler in (*POPULATION, "asha", "hyperband")
    tuner = Tuner(
        ray_tune.with_resources(Trial, ray_tune.PlacementGroupFactory([{HEAD: _share(at_once)}])),
        param_space=space,
        tune_config=TuneConfig(
            metric=VALUE,
            mode=search.direction,
            num_samples=samples,
            max_concurrent_trials=None if pausing else at_once,
            search_alg=searcher,
            scheduler=scheduler_of(search, train, seed),
            reuse_actors=True,
        ),
        run_config=RunConfig(
            name=f"{int(time.time())}",
            storage_path=sweep.at(TUNE_FOLDER),
            callbacks=[TrialCallback(progress)],
            stop=LimitStopper(progress),
            failure_config=FailureConfig(max_failures=2),
            verbose=0,
        ),
    )
    # Tune logs what `show` displays already.
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.air", "ray.train")]
    with quiet(loggers, logging.CRITICAL), _ends_as_ctrl_c():
        tuner.fit()
    remove_folder(sweep, TUNE_FOLDER)


@contextlib.contextmanager
def _ends_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl-C: Tune returns with the results so far. A second one raises KeyboardInterrupt.

    Signals that the process ignores stay ignored, as a shell ignores SIGINT for background jobs of a script.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        tune = signal.getsignal(TUNE_ENDS)
        # Tune restores the default handler after the first interruption.
        pressed = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if len(received) > 1 or pressed or not callable(tune):
            raise KeyboardInterrupt
        tune(number, frame)

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    with put_back([TUNE_HEEDS]):
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            os.environ[TUNE_HEEDS] = "1"
        before = {number: signal.signal(number, end) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)


def _is_settled(name: str, search: TuneSpec, records: TrialRecords) -> bool:
    """Return whether a trial has ended, and its results would not matter to the scheduler or the sampler."""
    ended = records.ended.get(name)
    if ended is None:
        return False
    return ended.state == "failed" or (search.sampler != "tpe" and search.scheduler in ("none", *POPULATION))


def _capacity(resources: ResourceSpec) -> int:
    """Return how many gangs of the largest size fit on the cluster, at least one."""
    from cluster.workers import nodes

    bundle = resources.per_worker.bundle
    there = sum(nodes.fitting_workers(node.total, node.labels, bundle) for node in nodes.alive())
    return max(1, there // resources.workers.max)


def _share(at_once: int) -> float:
    return max(int(HEAD_SHARE / at_once * 10_000) / 10_000, 0.0001)

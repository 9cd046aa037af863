"""Let Ray Tune drive the trials of a search."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from cluster.workers import ray_internals
from cluster.workers.environment import put_back
from orchestrator.config.resources import ResourceSpec
from orchestrator.data.quiet_logging import quiet
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.config import TrainSpec
from orchestrator.tune import lineage
from orchestrator.tune.config import POPULATION, TuneSpec
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.space import Config
from orchestrator.tune.trial_records import TrialRecords

TUNE_FOLDER = "_tune"
"""The folder of Ray Tune's own files. Nothing is read from it, and it is removed at the end."""
TUNE_HEEDS = "TUNE_DISABLE_SIGINT_HANDLER"
"""The variable that keeps Tune from handling SIGINT."""
TUNE_ENDS = signal.SIGUSR1
"""The signal that Tune always handles as it handles SIGINT."""
HEAD_SHARE = 0.99
"""The amount of it that all trials share, which limits how many run in parallel."""


def drive_trials(
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
        # Trials are driven on the head node, as other runs are.
        ray_tune.with_resources(
            Trial, ray_tune.PlacementGroupFactory([{ray_internals.HEAD: _share(at_once)}])
        ),
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
    room = sum(nodes.fitting_workers(node.total, node.labels, bundle) for node in nodes.alive())
    return max(1, room // resources.workers.max)


def _share(at_once: int) -> float:
    return max(int(HEAD_SHARE / at_once * 10_000) / 10_000, 0.0001)

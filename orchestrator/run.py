"""One run from the outside: check the job, find or start its controller, watch it to the end."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from orchestrator import assemble
from orchestrator.errors import InputError
from orchestrator.machines import Machine
from orchestrator.plan import plan
from orchestrator.rundir import RunDir
from orchestrator.spec import JobSpec, parse

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 3
"""Exit codes."""
EXIT_OF = {"done": DONE, "failed": FAILED, "stopped": STOPPED}
REFRESH = 0.25
"""Seconds between looks at the controller."""
SILENCE = 120.0
"""Seconds that a controller may be silent: Ray starts a dead one again meanwhile."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, the run's summary if there is one, and a line for the user."""

    code: int
    summary: dict[str, Any] | None
    line: str = ""


def run(
    spec: JobSpec,
    run_dir: RunDir,
    until: int | None,
    address: str | None,
    show: Callable[[dict[str, Any]], None],
    faults: tuple[str, ...] = (),
) -> Outcome:
    """Drive a run to its end, or on from where it is. `show` gets the status several times a second.

    Raises InputError before anything is written if the job is wrong or belongs to another run.
    """
    if (finished := finished_summary(run_dir)) and finished["state"] == "done":
        check_same_run(spec, run_dir)
        return Outcome(DONE, finished, f"{run_dir.uri} is finished: nothing to do")
    check(spec)
    check_same_run(spec, run_dir)
    if until is not None and until > spec.train.steps:
        raise InputError(f"step {until} is beyond train.steps {spec.train.steps}", "--until", "lower it")
    fresh = not run_dir.exists("events.jsonl")
    made = fresh and run_dir.local and not os.path.exists(run_dir.path)
    run_dir.create()
    from cluster.local import NoCluster, ray_at

    workers, worker = spec.resources.workers, spec.resources.per_worker
    try:
        with ray_at(address, workers.max * worker.cpu, workers.max * worker.gpu):
            outcome = _watch(_attach(spec, run_dir, until, faults), show)
    except NoCluster as error:
        outcome = Outcome(
            WRONG_INPUT, None, f"--address {address}: {error}; start one with `ray start --head`"
        )
    if outcome.code == WRONG_INPUT and made:
        shutil.rmtree(run_dir.path, ignore_errors=True)
    return outcome


def check(spec: JobSpec) -> None:
    """Find all that can be found wrong without starting anything. Raises InputError."""
    from orchestrator.data import sources

    files = sources.resolve(spec.data.sources)
    size = sum(file.size for file in files)
    if size < spec.data.sequence_length:
        raise InputError(
            f"the corpus has {size} bytes, fewer than one sequence of {spec.data.sequence_length} tokens",
            "data.sources",
            "give more text or lower data.sequence_length",
        )
    assemble.check_objective(spec)
    shape = assemble.shape_of(spec, assemble.vocabulary_size(spec))
    assemble.check_workload(spec)
    boundless = Machine(memory=float("inf"), flops=1e12)
    plan(spec, shape, spec.resources.workers.max, boundless)


def check_same_run(spec: JobSpec, run_dir: RunDir) -> None:
    """Refuse to go on with another run's directory. Raises InputError that names the first key that differs."""
    text = run_dir.read_text("job.yaml")
    if text is None:
        return
    before = parse(yaml.safe_load(text), run_dir.at("job.yaml"))
    ours, theirs = _flat(spec.identity()), _flat(before.identity())
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"{key} is {theirs.get(key)!r} in this run and {ours.get(key)!r} in the job file",
                run_dir.uri,
                "a run stays the same run: set it back, or give another name or --run-dir",
            )


def finished_summary(run_dir: RunDir) -> dict[str, Any] | None:
    """The summary of a run that has ended, None if it has not."""
    found = run_dir.read_json("summary.json")
    return found if isinstance(found, dict) else None


def _watch(controller: Any, show: Callable[[dict[str, Any]], None]) -> Outcome:
    import ray
    from ray.exceptions import RayActorError, RayError

    heard, asked = time.monotonic(), False
    while True:
        try:
            status = ray.get(controller.status.remote(), timeout=SILENCE)
            heard = time.monotonic()
            show(status)
            if status["summary"] or status["error"]:
                ray.kill(controller)
                return _outcome(status)
            time.sleep(REFRESH)
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            controller.request_stop.remote("stopped by the user")
        except RayActorError as error:
            if time.monotonic() - heard > SILENCE:
                return Outcome(FAILED, None, f"the controller is gone: {' '.join(str(error).split())[:200]}")
            time.sleep(REFRESH)
        except RayError as error:
            return Outcome(FAILED, None, f"the controller does not answer: {type(error).__name__}")


def _attach(spec: JobSpec, run_dir: RunDir, until: int | None, faults: tuple[str, ...]) -> Any:
    """The run's controller: the one that is at work with the same job, else a new one."""
    import ray

    from orchestrator.actor import controller_of, start_controller

    job = spec.model_dump(mode="json")
    controller = controller_of(run_dir)
    if controller is not None:
        status = ray.get(controller.status.remote(), timeout=SILENCE)
        if not (status["summary"] or status["error"]):
            if json.loads(json.dumps(ray.get(controller.job.remote(), timeout=SILENCE))) != [job, until]:
                mend = "stop it first, or attach with the same job and --until"
                raise InputError("this run is at work with another job file", run_dir.uri, mend)
            return controller
        ray.kill(controller)
        deadline = time.monotonic() + 10
        while controller_of(run_dir) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    return start_controller(job, run_dir, until, faults)


def _outcome(status: dict[str, Any]) -> Outcome:
    if error := status["error"]:
        return Outcome(WRONG_INPUT if error["input"] else FAILED, None, error["line"])
    found = status["summary"]
    return Outcome(EXIT_OF[found["state"]], found, found["reason"] or "")


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    return {
        k: v
        for name, inner in value.items()
        for k, v in _flat(inner, f"{key}.{name}" if key else name).items()
    }

"""One run from the outside: check the job, find or start its controller, watch it to the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.identity import check_same_run
from orchestrator.export.target import check_target
from orchestrator.job.errors import InputError
from orchestrator.job.outcome import Outcome
from orchestrator.job.spec import JobSpec
from orchestrator.launch.submission import no_cluster
from orchestrator.planning import prices
from orchestrator.planning.machines import Machine
from orchestrator.planning.plan import plan
from orchestrator.resolve import parts as assemble
from orchestrator.storage.backends import is_local, local_path
from orchestrator.storage.places import check_place
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir, remove_empty
from orchestrator.track.target import check_tracking

REFRESH = 0.25
"""Seconds between looks at the controller."""
LOOK = 5.0
"""Seconds for one answer of the controller, after which it is looked whether Ray is there at all."""
SILENCE = 120.0
"""Seconds that a controller may be silent: Ray starts a dead one again meanwhile."""


@dataclass(frozen=True)
class RunOutcome:
    """How a command ended, the run's summary if there is one, and a line for the user; which process of the Ray that
    it had started is gone, if that is why."""

    outcome: Outcome
    summary: dict[str, Any] | None
    line: str = ""
    fallen: str = ""


def run(
    spec: JobSpec,
    run_dir: RunDir,
    until: int | None,
    address: str | None,
    show: Callable[[dict[str, Any]], None],
    faults: tuple[str, ...] = (),
    priority: int = 0,
) -> RunOutcome:
    """Drive a run to its end, or on from where it is. `show` gets the status several times a second.

    Raises InputError before anything is written if the job is wrong or belongs to another run.
    """
    if found := done_already(spec, run_dir):
        return RunOutcome(Outcome.DONE, found, f"{run_dir.uri} is finished: nothing to do")
    check_places(spec, run_dir)
    check(spec)
    check_labels(spec, address)
    check_same_run(spec, run_dir)
    if run_dir.rows(TRIALS):
        raise InputError("is the folder of a search", run_dir.uri, "give another --run-dir, or use tune")
    if until is not None and until > spec.train.steps:
        raise InputError(f"step {until} is beyond train.steps {spec.train.steps}", "--until", "lower it")
    from cluster.local.ray_session import NoCluster, ray_at

    queue = None if address is None else priority
    workers, worker = spec.resources.workers, spec.resources.per_worker
    gpus = _gpus_here(spec) if address is None and worker.gpu else workers.max * worker.gpu
    made = run_dir.create()
    try:
        for last in (False, False, True):
            with ray_at(address, workers.max * worker.cpu, gpus):
                outcome = _watch(_attach(spec, run_dir, until, faults, queue), run_dir, show)
            if not outcome.fallen or last:
                break
        return outcome
    except NoCluster as error:
        raise no_cluster(error, address) from None
    finally:
        remove_empty(made)


def _gpus_here(spec: JobSpec) -> int:
    """GPUs that an embedded cluster may claim. Raises InputError if this machine has too few."""
    import torch

    least, most, there = spec.resources.workers.min, spec.resources.workers.max, torch.cuda.device_count()
    if there < least:
        what = f"the smallest gang needs {least} GPUs, and this machine has {there}"
        raise InputError(what, "resources.per_worker.gpu", "set it to 0, or name a cluster with --address")
    return min(most, there)


def check_labels(spec: JobSpec, address: str | None) -> None:
    """Raise InputError if the job asks for nodes with labels where there is only this machine, which has none."""
    if address is None and spec.resources.per_worker.labels:
        hint = "--set 'resources.per_worker.labels={}' leaves them out; or name a cluster with --address"
        raise InputError("only a cluster's nodes have labels", "resources.per_worker.labels", hint)


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
    workers = spec.resources.workers
    best = plan(spec, shape, workers.max, boundless).chosen.layout
    if best.world < workers.min:
        raise InputError(
            f"no legal layout uses {workers.min} to {workers.max} workers; the widest is {best}",
            "resources.workers.min",
            "lower it, or choose a train.global_batch that divides",
        )
    prices.check(spec)
    if spec.checkpoint.export_to:
        check_target(spec.checkpoint.export_to)


def check_places(spec: JobSpec, run_dir: RunDir) -> None:
    """Refuse places that only one process would see. Raises InputError."""
    places = {
        "--run-dir": run_dir.uri,
        **{f"data.sources.{n}.uri": source.uri for n, source in enumerate(spec.data.sources)},
        "data.cache": spec.data.cache,
        "checkpoint.export_to": spec.checkpoint.export_to,
    }
    for where, uri in places.items():
        if uri is not None and not where.startswith("data.sources"):  # those are patterns, and must be there
            check_place(uri, where)
        if (uri or "").startswith("memory://"):
            what = f"{uri} is the memory of one process, and a run has several"
            raise InputError(what, where, "give a folder that all nodes see, or a store such as s3://")
    cache = local_path(spec.data.cache) if spec.data.cache and is_local(spec.data.cache) else ""
    if os.path.lexists(cache) and not os.path.isdir(cache):
        raise InputError("is no folder", f"data.cache {cache}", "give another")
    if spec.tracking:
        check_tracking(spec.tracking.uri)


def finished_summary(run_dir: RunDir) -> dict[str, Any] | None:
    """The summary of a run that has ended, None if it has not."""
    return run_dir.told("summary.json") or None


def done_already(spec: JobSpec, run_dir: RunDir) -> dict[str, Any] | None:
    """The summary of a run that is done and has its last commit, None if there is something to do.

    One whose last commit is damaged or gone goes on from the one before; where none is left, as where they were removed
    to save space, it stays done. Raises InputError if the run is another one.
    """
    found = finished_summary(run_dir)
    if not found or found.get("state") != "done":
        return None
    commit, last = check_same_run(spec, run_dir), found.get("commit")
    return None if commit is not None and isinstance(last, int) and commit.step < last else found


def _watch(controller: Any, run_dir: RunDir, show: Callable[[dict[str, Any]], None]) -> RunOutcome:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError

    from cluster.local.ray_session import fallen

    began, heard, asked = time.time(), time.monotonic(), False
    status: dict[str, Any] = {}
    while True:
        if gone := fallen():
            show({**status, "phase": "wait", "note": f"Ray's {gone} has died; Ray is started again"})
            line = f"Ray's {gone} on this machine has died; the same command goes on from the last commit"
            return RunOutcome(Outcome.FAILED, None, line, fallen=gone)
        try:
            status = ray.get(controller.status.remote(), timeout=LOOK)
            heard = time.monotonic()
            show(status)
            if status["summary"] or status["error"]:
                return _outcome(status)
            time.sleep(REFRESH)
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            controller.request_stop.remote("stopped by the user")
        except (RayActorError, GetTimeoutError) as error:
            if (summary := finished_summary(run_dir)) and (summary["ended"] or 0.0) > began:
                return RunOutcome(Outcome(summary["state"]), summary, summary["reason"] or "")
            if time.monotonic() - heard > SILENCE:
                return RunOutcome(
                    Outcome.FAILED, None, f"the controller is gone: {' '.join(str(error).split())[:200]}"
                )
            time.sleep(REFRESH)
        except RayError as error:
            why = " ".join(str(error).strip().splitlines()[-1:])[:300]
            return RunOutcome(
                Outcome.FAILED, None, f"the controller does not answer: {type(error).__name__}: {why}"
            )


def _attach(
    spec: JobSpec, run_dir: RunDir, until: int | None, faults: tuple[str, ...], priority: int | None
) -> Any:
    """The run's controller: the one that is at work with the same job, else a new one."""
    import ray

    from orchestrator.launch.controller_actor import controller_of, start_controller

    job = spec.model_dump(mode="json")
    controller = controller_of(run_dir)
    if controller is not None:
        status = ray.get(controller.status.remote(), timeout=SILENCE)
        if status["summary"] and status["summary"]["state"] == "done":
            return controller  # it ended a moment ago, and can tell
        if not (status["summary"] or status["error"]):
            if json.loads(json.dumps(ray.get(controller.job.remote(), timeout=SILENCE))) != [job, until]:
                hint = "stop it first, or attach with the same job and --until"
                raise InputError("this run is at work with another job file", run_dir.uri, hint)
            return controller
        ray.kill(controller)
        deadline = time.monotonic() + 10
        while controller_of(run_dir) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    return start_controller(job, run_dir, until, faults, priority)


def _outcome(status: dict[str, Any]) -> RunOutcome:
    if error := status["error"]:
        return RunOutcome(Outcome.WRONG_INPUT if error["input"] else Outcome.FAILED, None, error["line"])
    found = status["summary"]
    outcome, line = Outcome(found["state"]), found["reason"] or ""
    if (
        outcome == Outcome.STOPPED and found.get("commit") is None
    ):  # a command ends so with a commit in place only
        return RunOutcome(
            Outcome.FAILED, found, f"{line}; there is no commit yet, and the same command begins anew"
        )
    return RunOutcome(outcome, found, line)

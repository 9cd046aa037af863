"""The controller as a detached Ray actor: it outlives the command that started it and can be attached again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.metrics import Gauge

from cluster.jobs.job_queue import QueueClient
from cluster.local.ray_session import NAMESPACE, ON_HEAD
from cluster.workers.on_ray import on_ray
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller.controller import Controller
from orchestrator.storage.run_directory import RunDir

EVERY = 5.0
"""Seconds between updates; Ray reports about as often."""
GAUGES = {
    "orchestrator_step": "optimiser steps done",
    "orchestrator_steps": "optimiser steps that the job has",
    "orchestrator_attempt": "number of the attempt",
    "orchestrator_loss": "loss of the last step, of a token, record, pair or sample: by the objective",
    "orchestrator_tokens_per_second": "tokens a second of the last step",
    "orchestrator_mfu": "model FLOPs utilisation of the last step, 0 to 1",
    "orchestrator_eta_seconds": "seconds left while it trains",
    "orchestrator_ranks": "ranks that run",
}
"""Names and what they are."""
PARTS = "orchestrator_step_part_seconds"
"""Mean seconds of a late step that went to the part in the tag `part`."""


class RunMetrics:
    """The gauges of one run."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges = {name: Gauge(name, text, ("run",)) for name, text in GAUGES.items()}
        self._parts = Gauge(PARTS, "mean seconds of a late step, by part", ("run", "part"))

    def update(self, status: Mapping[str, Any]) -> None:
        """Set them from a status, see `orchestrator.controller.controller`; what is not known keeps its last value."""
        ranks = sum(rank.get("state") == "running" for rank in status.get("ranks") or ())
        for name, gauge in self._gauges.items():
            value = ranks if name == "orchestrator_ranks" else status.get(name.removeprefix("orchestrator_"))
            if isinstance(value, int | float):
                gauge.set(float(value), self._tags)
        for part, seconds in (status.get("step_parts") or {}).items():
            self._parts.set(float(seconds), {**self._tags, "part": part})


def export(run: str, status: Callable[[], Mapping[str, Any]]) -> None:
    """Update the metrics of a run from a thread of its own, as long as this process lives."""

    def work() -> None:
        metrics, pause = RunMetrics(run), threading.Event()
        while True:
            with contextlib.suppress(Exception):  # telemetry may not end a run
                metrics.update(status())
            pause.wait(EVERY)

    threading.Thread(target=work, name="run-metrics", daemon=True).start()


LINGER = 60.0
"""Seconds that a controller whose run has ended waits for someone to read how."""


class ControllerActor:
    """One run. If Ray starts this actor again, it goes on from the run directory.

    With a `priority` it shares the cluster with other runs, by the cluster's queue. `shared` names a process of this
    machine that does the imports of ranks already.
    """

    def __init__(
        self,
        job: dict[str, Any],
        run_uri: str,
        until: int | None,
        faults: tuple[str, ...],
        priority: int | None = None,
        launched: float = 0.0,
        shared: str = "",
    ) -> None:
        self._job, self._until = job, until
        spec, self._run, cluster = parse(job), RunDir(run_uri), on_ray(shared)
        self._queue: QueueClient | None = None
        if priority is not None:
            workers, bundle = spec.resources.workers, spec.resources.per_worker.bundle
            most = workers.max + spec.evaluates_beside
            queue = QueueClient(self._run.uri, priority, bundle, workers.min, most)
            cluster = dataclasses.replace(cluster, request_workers=lambda bundle, count: queue.want(count))
            self._queue = queue
        # Ray has started this actor again: nobody asked for that, and it may go on for ever.
        self._died = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        given = faults, self._queue, self._died, launched
        self._controller = Controller(spec, self._run, until, cluster, *given)
        self._controller.log.capture()
        self._summary: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        threading.Thread(target=self._drive, name="controller", daemon=True).start()
        export(spec.name, self._controller.status)

    def status(self) -> dict[str, Any]:
        """The controller's status; with `summary` or `error` once it has ended."""
        return {**self._controller.status(), "summary": self._summary, "error": self._error}

    def job(self) -> tuple[dict[str, Any], int | None]:
        """What this controller was started with."""
        return self._job, self._until

    def request_stop(self, reason: str) -> None:
        """Commit at the next step boundary and end."""
        self._controller.request_stop(reason)

    def _drive(self) -> None:
        try:
            if self._died and self._run.is_gone():  # moved or removed after the run had ended, say
                hint = "give the command again, with the directory where it is now"
                raise InputError("the run directory is gone", self._run.uri, hint)
            with self._run.lock():
                self._summary = self._controller.drive()
        except InputError as error:
            self._error = {"line": str(error), "input": True}
        except BaseException as error:  # a controller that dies silently would be waited for
            traceback.print_exc()
            self._error = {"line": f"{type(error).__name__}: {' '.join(str(error).split())}", "input": False}
        finally:
            if self._queue is not None:
                self._queue.leave()
        time.sleep(LINGER)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def controller_of(run: RunDir) -> Any | None:
    """The handle of the controller that drives this run on the connected cluster, if there is one."""
    try:
        return ray.get_actor(_name(run), namespace=NAMESPACE)
    except ValueError:
        return None


def start_controller(
    job: dict[str, Any],
    run: RunDir,
    until: int | None,
    faults: tuple[str, ...],
    priority: int | None = None,
    launched: float = 0.0,
    shared: str = "",
) -> Any:
    """A new detached controller for the run, or the one that another command has just started."""
    options: dict[str, Any] = {"name": _name(run), "namespace": NAMESPACE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_concurrency": 8}
    options["resources"] = ON_HEAD
    remote: Any = ray.remote(ControllerActor)
    return remote.options(**options).remote(job, run.uri, until, faults, priority, launched, shared)


def _name(run: RunDir) -> str:
    return "run-" + hashlib.sha256(run.uri.encode()).hexdigest()[:16]

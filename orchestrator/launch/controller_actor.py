"""The controller as a detached Ray actor. It outlives the command that started it, and commands can attach to it."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import traceback
from typing import Any

import ray

from cluster.jobs.job_queue import QueueClient
from cluster.local.ray_session import NAMESPACE, ON_HEAD
from cluster.workers.on_ray import on_ray
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller.controller import Controller
from orchestrator.launch.prometheus_gauges import export
from orchestrator.storage.run_directory import RunDir

LINGER = 60.0
"""Seconds that a controller lives on after its run has ended, so that a command can read the outcome."""


class ControllerActor:
    """Drives one run. If Ray restarts this actor, the run continues from its directory."""

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
        """Start to drive the run in a thread.

        Args:
            job: the job as plain data.
            run_uri: the run directory.
            until: a step to stop at, None for none.
            faults: faults to inject, for tests.
            priority: the run's priority in the cluster's queue, higher ones first; None if the run has the cluster to
                itself.
            launched: unix time of the command that started the run.
            shared: the name of a process on this machine that has the imports of ranks done, empty without one.
        """
        self._job = job
        self._until = until
        self._run = RunDir(run_uri)
        spec = parse(job)
        cluster = on_ray(shared)
        self._queue: QueueClient | None = None
        if priority is not None:
            workers = spec.all_workers
            bundle = spec.resources.per_worker.bundle
            queue = QueueClient(self._run.uri, priority, bundle, workers.min, workers.max)
            cluster = dataclasses.replace(cluster, request_workers=lambda bundle, count: queue.want(count))
            self._queue = queue
        # Whether Ray has restarted this actor, which it does without limit.
        self._died = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._controller = Controller(
            spec,
            self._run,
            until,
            cluster,
            faults=faults,
            queue=self._queue,
            died=self._died,
            launched=launched,
        )
        self._controller.log.capture()
        self._summary: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        threading.Thread(target=self._drive, name="controller", daemon=True).start()
        export(spec.name, self.status)

    def status(self) -> dict[str, Any]:
        """Return the controller's status, with its `summary` or `error` once the run has ended."""
        return {**self._controller.status(), "summary": self._summary, "error": self._error}

    def job(self) -> tuple[dict[str, Any], int | None]:
        """Return the job and the `until` that this controller was started with."""
        return self._job, self._until

    def request_stop(self, reason: str) -> None:
        """Ask the run to commit at the next step boundary and end."""
        self._controller.request_stop(reason)

    def _drive(self) -> None:
        try:
            if self._died and self._run.is_gone():  # for example moved or removed after the run had ended
                hint = "give the command again, with the directory where it is now"
                raise InputError("the run directory is gone", self._run.uri, hint)
            with self._run.lock():
                self._summary = self._controller.drive()
        except InputError as error:
            self._error = {"line": str(error), "input": True}
        except BaseException as error:  # commands would wait for a controller that dies silently
            traceback.print_exc()
            self._error = {"line": f"{type(error).__name__}: {' '.join(str(error).split())}", "input": False}
        finally:
            if self._queue is not None:
                self._queue.leave()
        time.sleep(LINGER)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def controller_of(run: RunDir) -> Any | None:
    """Return the handle of the controller that drives this run on the connected cluster, None without one."""
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
    """Start a detached controller for the run, or return the one that another command has just started.

    For the arguments see `ControllerActor`.
    """
    remote: Any = ray.remote(ControllerActor)
    actor = remote.options(
        name=_name(run),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=8,
        resources=ON_HEAD,
    )
    return actor.remote(
        job,
        run.uri,
        until,
        faults=faults,
        priority=priority,
        launched=launched,
        shared=shared,
    )


def _name(run: RunDir) -> str:
    return "run-" + hashlib.sha256(run.uri.encode()).hexdigest()[:16]

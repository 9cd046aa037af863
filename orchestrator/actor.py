"""The controller as a detached Ray actor: it outlives the command that started it and can be attached again."""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
from typing import Any

import ray

from cluster.local import NAMESPACE
from cluster.on_ray import on_ray
from orchestrator.controller import Controller
from orchestrator.errors import InputError
from orchestrator.rundir import RunDir
from orchestrator.spec import parse

LINGER = 60.0
"""Seconds that a controller whose run has ended waits for someone to read how."""


class ControllerActor:
    """One run. If Ray starts this actor again, it goes on from the run directory."""

    def __init__(self, job: dict[str, Any], run_uri: str, until: int | None, faults: tuple[str, ...]) -> None:
        self._job, self._until = job, until
        self._run = RunDir(run_uri)
        self._controller = Controller(parse(job), self._run, until, on_ray(), faults)
        self._summary: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        threading.Thread(target=self._drive, name="controller", daemon=True).start()

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
            with self._run.lock():
                self._summary = self._controller.drive()
        except InputError as error:
            self._error = {"line": str(error), "input": True}
        except BaseException as error:  # a controller that dies silently would be waited for
            traceback.print_exc()
            self._error = {"line": f"{type(error).__name__}: {' '.join(str(error).split())}", "input": False}
        time.sleep(LINGER)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def controller_of(run: RunDir) -> Any | None:
    """The handle of the controller that drives this run on the connected cluster, if there is one."""
    try:
        return ray.get_actor(_name(run), namespace=NAMESPACE)
    except ValueError:
        return None


def start_controller(job: dict[str, Any], run: RunDir, until: int | None, faults: tuple[str, ...]) -> Any:
    """A new detached controller for the run, or the one that another command has just started."""
    options: dict[str, Any] = {"name": _name(run), "namespace": NAMESPACE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_concurrency": 8}
    remote: Any = ray.remote(ControllerActor)
    return remote.options(**options).remote(job, run.uri, until, faults)


def _name(run: RunDir) -> str:
    return "run-" + hashlib.sha256(run.uri.encode()).hexdigest()[:16]

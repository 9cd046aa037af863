"""The controller as a detached Ray actor: it outlives the command that started it and can be attached again."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import time
import traceback
from typing import Any

import ray

from cluster.jobs.job_queue import QueueClient, QueuedGang
from cluster.local.ray_session import NAMESPACE, ON_HEAD
from cluster.workers.gang import Bundle
from cluster.workers.on_ray import on_ray
from orchestrator.control.controller import STATUS_EVERY, Controller
from orchestrator.job.errors import InputError
from orchestrator.job.spec import parse
from orchestrator.storage.run_directory import RunDir

LINGER = 60.0
"""Seconds that a controller whose run has ended waits for someone to read how."""
HIDDEN = ("summary", "error")
"""What of the status is for those who ask, and not for status.json."""


class NoCapacity(Exception):
    """The cluster is too small for the job, and nobody has added machines in time."""


class ControllerActor:
    """One run. If Ray starts this actor again, it goes on from the run directory.

    With a `priority` it shares the cluster with other runs: it waits for its turn, and makes room if it must.
    """

    def __init__(
        self,
        job: dict[str, Any],
        run_uri: str,
        until: int | None,
        faults: tuple[str, ...],
        priority: int | None = None,
    ) -> None:
        self._job, self._until, self._faults, self._priority = job, until, faults, priority
        self._spec, self._run = parse(job), RunDir(run_uri)
        self._turn: QueueClient | None = None
        self._stop = self._made_room = ""
        # Ray has started it again: nobody asked for that, and it may go on for ever.
        died = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._controller = self._fresh(died)
        self._summary: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        threading.Thread(target=self._drive, name="controller", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """The controller's status; with `summary` or `error` once it has ended."""
        told = {**self._controller.status(), "summary": self._summary, "error": self._error}
        if self._turn is not None and not self._turn.verdict.go and self._summary is None:
            told |= {"phase": "wait", "note": f"waits for its turn: {self._turn.verdict.waits_for}"}
        return told

    def job(self) -> tuple[dict[str, Any], int | None]:
        """What this controller was started with."""
        return self._job, self._until

    def request_stop(self, reason: str) -> None:
        """Commit at the next step boundary and end."""
        self._stop = reason
        self._controller.request_stop(reason)

    def _fresh(self, died: bool = False) -> Controller:
        cluster = on_ray()
        if self._priority is not None:
            gang = functools.partial(QueuedGang, self._room)
            cluster = dataclasses.replace(cluster, gang=gang, want=self._want)
        return Controller(self._spec, self._run, self._until, cluster, self._faults, died)

    def _room(self) -> int:
        """How many workers this run may have in its turn."""
        return self._turn.verdict.room if self._turn is not None else 0

    def _want(self, bundle: Bundle, workers: int) -> None:
        """Have the cluster grow to so many workers for this run, as far as it can."""
        if self._turn is not None:
            self._turn.want(workers)

    def _drive(self) -> None:
        try:
            with self._run.lock():
                if self._priority is not None:
                    workers, bundle = self._spec.resources.workers, self._spec.resources.per_worker.bundle
                    self._turn = QueueClient(self._run.uri, self._priority, bundle, workers.min, workers.max)
                self._summary = self._drive_in_turns()
        except InputError as error:
            self._error = {"line": str(error), "input": True}
        except NoCapacity as error:
            self._error = {"line": str(error), "input": False}
        except BaseException as error:  # a controller that dies silently would be waited for
            traceback.print_exc()
            self._error = {"line": f"{type(error).__name__}: {' '.join(str(error).split())}", "input": False}
        finally:
            if self._turn is not None:
                self._turn.leave()
        time.sleep(LINGER)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _drive_in_turns(self) -> dict[str, Any]:
        """Drive to the end; as often as the run made room for another, queue and go on from the commit."""
        while True:
            self._await_turn()
            watching = threading.Thread(target=self._watch_turn, args=(self._controller,), daemon=True)
            watching.start()
            summary = self._controller.drive()
            if self._stop or not self._made_room or summary["state"] != "stopped":
                return summary
            assert self._turn is not None
            self._turn.again()
            self._made_room = ""
            self._controller = self._fresh()

    def _await_turn(self) -> None:
        """Wait until it is this run's turn, or it is to stop; the run directory says what it waits for.

        Raises NoRoom if the cluster has been too small, whoever is on it, for as long as the job's limit says.
        """
        written, limit = 0.0, self._spec.limits.wait
        possible = time.monotonic()
        while self._turn is not None and not (verdict := self._turn.verdict).go and not self._stop:
            possible = time.monotonic() if verdict.possible else possible
            if (waited := time.monotonic() - possible) > limit:
                text = f"waited {waited:.0f} s for {verdict.waits_for}"
                raise NoCapacity(text + "; lower resources.workers.min or add machines")
            if time.monotonic() - written > STATUS_EVERY:
                written = time.monotonic()
                self._run.write_json(
                    "status.json", {k: v for k, v in self.status().items() if k not in HIDDEN}
                )
            time.sleep(0.1)

    def _watch_turn(self, controller: Controller) -> None:
        """Tell the queue what the run holds, and the run when it must make room."""
        while self._turn is not None and controller is self._controller and self._summary is None:
            self._turn.hold([rank["node"] for rank in controller.status()["ranks"]])
            if (other := self._turn.verdict.yield_to) and not self._made_room:
                self._made_room = other
                controller.request_stop(f"makes room for {other}")
            time.sleep(0.2)


def controller_of(run: RunDir) -> Any | None:
    """The handle of the controller that drives this run on the connected cluster, if there is one."""
    try:
        return ray.get_actor(_name(run), namespace=NAMESPACE)
    except ValueError:
        return None


def start_controller(
    job: dict[str, Any], run: RunDir, until: int | None, faults: tuple[str, ...], priority: int | None = None
) -> Any:
    """A new detached controller for the run, or the one that another command has just started."""
    options: dict[str, Any] = {"name": _name(run), "namespace": NAMESPACE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_concurrency": 8}
    options["resources"] = ON_HEAD
    remote: Any = ray.remote(ControllerActor)
    return remote.options(**options).remote(job, run.uri, until, faults, priority)


def _name(run: RunDir) -> str:
    return "run-" + hashlib.sha256(run.uri.encode()).hexdigest()[:16]

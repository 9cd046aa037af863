"""The queue of a cluster that several jobs share, and what all of them together want of its autoscaler.

One detached actor keeps it, since Ray's autoscaler knows only the latest request for resources, whoever made it. It
remembers nothing that the jobs do not tell it again: if it dies, the next question restores it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.jobs.admission import Admission, QueuedJob, admissions
from cluster.local.ray_session import NAMESPACE, ON_HEAD
from cluster.workers.clock import wall
from cluster.workers.gang import Bundle
from cluster.workers.nodes import alive

ASK_EVERY = 1.0
"""Seconds between a job's questions."""
FORGET = 30.0
"""Seconds without a question after which a job is taken to be gone."""
REMIND_EVERY = 2.0
"""Seconds between repeated requests: the autoscaler keeps only the last one, and Ray Data makes its own."""
ANSWER_TIMEOUT = 60.0
"""Seconds for the queue to answer: it may have to be started first."""
ACTOR = "queue"


class JobQueue:
    """See above; in an actor, so questions come one at a time."""

    def __init__(self) -> None:
        self._tickets: dict[str, QueuedJob] = {}
        self._wants: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        self._requested: list[Bundle] = []
        self._reminded = 0.0

    def ask(self, ticket: dict[str, Any], want: int) -> dict[str, Any]:
        """The verdict on a job that says what it asks for, and how many workers it would use."""
        mine = QueuedJob(**{**ticket, "bundle": Bundle(**ticket["bundle"])})
        before = self._tickets.get(mine.name)
        if before is not None and before.running and before.since == mine.since:
            mine = dataclasses.replace(mine, running=True)
        self._tickets[mine.name], self._wants[mine.name] = mine, want
        self._heard[mine.name] = time.monotonic()
        for name in [name for name, heard in self._heard.items() if time.monotonic() - heard > FORGET]:
            self._forget(name)
        verdict = admissions(list(self._tickets.values()), alive())[mine.name]
        if verdict.go:
            self._tickets[mine.name] = dataclasses.replace(mine, running=True)
        self._request()
        return dataclasses.asdict(verdict)

    def leave(self, name: str) -> None:
        """This job asks for nothing any more."""
        self._forget(name)
        self._request()

    def tickets(self) -> list[dict[str, Any]]:
        """Who asks for what."""
        return [dataclasses.asdict(ticket) for ticket in self._tickets.values()]

    def _forget(self, name: str) -> None:
        for table in (self._tickets, self._wants, self._heard):
            table.pop(name, None)

    def _request(self) -> None:
        wanted = [t.bundle for name, t in sorted(self._tickets.items()) for _ in range(self._wants[name])]
        again = bool(wanted) and time.monotonic() - self._reminded > REMIND_EVERY
        if again or wanted != self._requested:
            from ray.autoscaler.sdk import request_resources

            labels = [dict(bundle.labels) for bundle in wanted]
            request_resources(bundles=[b.resources for b in wanted], bundle_label_selectors=labels)
            self._requested, self._reminded = wanted, time.monotonic()


class QueueClient:
    """A job's place in the queue. A thread asks every second; the job reads what was last said."""

    def __init__(self, name: str, priority: int, bundle: Bundle, least: int, most: int) -> None:
        self._ticket = QueuedJob(name, priority, wall(), bundle, least, most)
        self._want = most
        self._admission: Admission | None = None
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="turn", daemon=True)
        self._thread.start()

    @property
    def admission(self) -> Admission:
        """What the queue last said."""
        return self._admission or Admission(False, waits_for="the cluster's queue")

    def report_nodes(self, places: Sequence[str]) -> None:
        """Say on which nodes, by address, the job's workers are now."""
        with self._lock:
            self._ticket = dataclasses.replace(self._ticket, places=tuple(places))

    def want(self, workers: int) -> None:
        """Say how many workers the job would use if the cluster had them: its autoscaler is told."""
        self._want = workers

    def requeue(self) -> None:
        """Go back into the line, as one who made room: behind those that wait already."""
        with self._lock:
            name = self._ticket.name
            self._ticket = dataclasses.replace(self._ticket, places=(), since=wall(), running=False)
            self._admission = None
        with contextlib.suppress(RayError):
            ray.get(_queue().leave.remote(name), timeout=ANSWER_TIMEOUT)

    def leave(self) -> None:
        """Ask for nothing any more."""
        self._left.set()
        self._thread.join(timeout=ANSWER_TIMEOUT)
        with contextlib.suppress(RayError):
            ray.get(_queue().leave.remote(self._ticket.name), timeout=ANSWER_TIMEOUT)

    def _ask_on(self) -> None:
        while not self._left.is_set():
            asked = self._ticket
            with contextlib.suppress(RayError):  # a queue that is gone is started again
                answer = ray.get(
                    _queue().ask.remote(dataclasses.asdict(asked), self._want), timeout=ANSWER_TIMEOUT
                )
                self._hear(asked, Admission(**answer))
            self._left.wait(ASK_EVERY)

    def _hear(self, asked: QueuedJob, verdict: Admission) -> None:
        with self._lock:
            if asked.since == self._ticket.since:  # else it is about an earlier place in the line
                self._admission = verdict
                self._ticket = dataclasses.replace(self._ticket, running=verdict.go)


def _queue() -> Any:
    remote: Any = ray.remote(JobQueue)
    options: dict[str, Any] = {"name": ACTOR, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    options |= {"get_if_exists": True, "max_restarts": -1, "resources": ON_HEAD}
    return remote.options(**options).remote()

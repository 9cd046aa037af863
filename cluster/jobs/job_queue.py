"""The job queue of a shared cluster, which also requests the resources of all jobs from the autoscaler.

One detached actor holds the queue, because Ray's autoscaler knows only the latest request, whoever made it. Each
question of a job contains everything that the queue needs, so the next questions restore a queue that died.
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
"""Seconds between two questions of a job to the queue."""
FORGET_AFTER = 30.0
"""Seconds without a question after which a job counts as gone."""
REMIND_EVERY = 2.0
"""Seconds after which a request for resources is repeated, because Ray Data may have replaced it by its own."""
ANSWER_TIMEOUT = 60.0
"""Seconds to wait for an answer of the queue, which may have to be started first."""
ACTOR = "queue"


class JobQueue:
    """The queue. It runs in an actor, which handles one question at a time."""

    def __init__(self) -> None:
        self._tickets: dict[str, QueuedJob] = {}
        self._wants: dict[str, int] = {}
        self._last_asked: dict[str, float] = {}
        self._requested: list[Bundle] = []
        self._requested_at = 0.0

    def ask(self, ticket: dict[str, Any], want: int) -> dict[str, Any]:
        """Answer a job.

        Args:
            ticket: the fields of its `QueuedJob`.
            want: how many workers it could use.

        Returns:
            The fields of an `Admission`.
        """
        job = QueuedJob(**{**ticket, "bundle": Bundle(**ticket["bundle"])})
        before = self._tickets.get(job.name)
        if before is not None and before.running and before.since == job.since:
            job = dataclasses.replace(job, running=True)
        self._tickets[job.name] = job
        self._wants[job.name] = want
        self._last_asked[job.name] = time.monotonic()
        for name in [
            name for name, last in self._last_asked.items() if time.monotonic() - last > FORGET_AFTER
        ]:
            self._forget(name)
        admission = admissions(list(self._tickets.values()), alive())[job.name]
        if admission.go:
            self._tickets[job.name] = dataclasses.replace(job, running=True)
        self._request()
        return dataclasses.asdict(admission)

    def leave(self, name: str) -> None:
        """Remove a job from the queue."""
        self._forget(name)
        self._request()

    def tickets(self) -> list[dict[str, Any]]:
        """Return the jobs in the queue, as fields of `QueuedJob`."""
        return [dataclasses.asdict(ticket) for ticket in self._tickets.values()]

    def _forget(self, name: str) -> None:
        for table in (self._tickets, self._wants, self._last_asked):
            table.pop(name, None)

    def _request(self) -> None:
        """Request the workers of all jobs from the autoscaler, if they have changed or the request is old."""
        wanted = [t.bundle for name, t in sorted(self._tickets.items()) for _ in range(self._wants[name])]
        again = bool(wanted) and time.monotonic() - self._requested_at > REMIND_EVERY
        if again or wanted != self._requested:
            from ray.autoscaler.sdk import request_resources

            labels = [dict(bundle.labels) for bundle in wanted]
            request_resources(bundles=[b.resources for b in wanted], bundle_label_selectors=labels)
            self._requested = wanted
            self._requested_at = time.monotonic()


class QueueClient:
    """A job's client of the queue. A thread asks it every ASK_EVERY seconds; `admission` is the last answer."""

    def __init__(self, name: str, priority: int, bundle: Bundle, least: int, most: int) -> None:
        self._ticket = QueuedJob(name, priority, since=wall(), bundle=bundle, least=least, most=most)
        self._want = most
        self._admission: Admission | None = None
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._poll_queue, name="job-queue", daemon=True)
        self._thread.start()

    @property
    def admission(self) -> Admission:
        """The queue's last answer. Not admitted before the first."""
        return self._admission or Admission(False, waits_for="the cluster's queue")

    def report_nodes(self, addresses: Sequence[str]) -> None:
        """Set the node addresses of the job's workers."""
        with self._lock:
            self._ticket = dataclasses.replace(self._ticket, places=tuple(addresses))

    def want(self, workers: int) -> None:
        """Set how many workers the job could use. The queue requests them from the autoscaler."""
        self._want = workers

    def requeue(self) -> None:
        """Queue again after yielding, behind the waiting jobs."""
        with self._lock:
            name = self._ticket.name
            self._ticket = dataclasses.replace(self._ticket, places=(), since=wall(), running=False)
            self._admission = None
        with contextlib.suppress(RayError):
            ray.get(_queue().leave.remote(name), timeout=ANSWER_TIMEOUT)

    def leave(self) -> None:
        """Stop asking, and leave the queue."""
        self._left.set()
        self._thread.join(timeout=ANSWER_TIMEOUT)
        with contextlib.suppress(RayError):
            ray.get(_queue().leave.remote(self._ticket.name), timeout=ANSWER_TIMEOUT)

    def _poll_queue(self) -> None:
        while not self._left.is_set():
            ticket = self._ticket
            with contextlib.suppress(RayError):  # the next question starts a queue that has died again
                answer = ray.get(
                    _queue().ask.remote(dataclasses.asdict(ticket), self._want), timeout=ANSWER_TIMEOUT
                )
                self._on_answer(ticket, Admission(**answer))
            self._left.wait(ASK_EVERY)

    def _on_answer(self, ticket: QueuedJob, admission: Admission) -> None:
        with self._lock:
            if ticket.since == self._ticket.since:  # otherwise the answer is older than `requeue`
                self._admission = admission
                self._ticket = dataclasses.replace(self._ticket, running=admission.go)


def _queue() -> Any:
    remote: Any = ray.remote(JobQueue)
    options: dict[str, Any] = {"name": ACTOR, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    options |= {"get_if_exists": True, "max_restarts": -1, "resources": ON_HEAD}
    return remote.options(**options).remote()

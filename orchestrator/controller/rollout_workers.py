"""The rollout workers of a run, which generate answers beside its gang, and what ranks and workers meet through.

`decide` says how many there are. Each is a gang of one, so that one comes or goes without the others. What it was
generating when it goes, another one generates again, and the answers are the same.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from cluster.workers.cluster import Cluster
from cluster.workers.device_limits import DeviceLimits
from cluster.workers.gang import Bundle, Gang, RankStatus
from orchestrator.config.resources import Workers
from orchestrator.controller.decide import BEGINS
from orchestrator.controller.health import Failure, Vitals, first_fault
from orchestrator.controller.state import Phase
from orchestrator.observe.rank_log import output_of_rollouts
from orchestrator.train.rollouts.work_queue import RolloutQueue, worker_name
from orchestrator.train.task import ENTRY, WEIGHT_SERVER, RolloutPlace, Task

LONGEST_STEP = 10.0
"""Stands for a gang's longest step, in seconds, where it is judged whether a worker is silent."""


@dataclass
class _Worker:
    """A rollout worker.

    Attributes:
        number: its number; no two of a controller have the same.
        gang: its gang.
        rank: how it was last seen; None before its process runs.
        batches: how much it had generated when it was last seen.
        moved: the monotonic time of its last progress, or of its last wait for work.
    """

    number: int
    gang: Gang
    rank: RankStatus | None = None
    batches: int = 0
    moved: float = 0.0


class RolloutWorkers:
    """The rollout workers of one run; none if `asked` is None.

    Attributes:
        moved: the monotonic time at which one of them last generated a token; 0 before.
    """

    def __init__(
        self, cluster: Cluster, run: str, asked: Workers | None, bundle: Bundle, limits: DeviceLimits
    ) -> None:
        """Start no worker yet.

        Args:
            cluster: where to run.
            run: the URI of the run directory.
            asked: how many the job asks for; None if the ranks generate answers themselves.
            bundle: what a worker occupies.
            limits: the time limits of a worker.
        """
        self._cluster = cluster
        self._run = run
        self._bundle = bundle
        self._limits = limits
        self._workers: tuple[_Worker, ...] = ()
        """Replaced and never modified, because `status` reads it from another thread."""
        self._made = 0
        self._task: Task | None = None
        self._news: list[str] = []
        self.moved = 0.0
        self._queue: RolloutQueue | None = None
        if asked is not None:
            self._queue = RolloutQueue(cluster.host())
            self._services = cluster.services(WEIGHT_SERVER, self._queue.token)
            self._servers: list[dict[str, str]] = []

    def place(self) -> dict[str, Any]:
        """Start missing servers of weights, and return the fields of a `Task` that name the place of work."""
        if self._queue is None:
            return {}
        self._start_servers()
        place = RolloutPlace(self._queue.address, self._queue.token, weights_token=self._queue.token)
        return {"rollouts": dataclasses.asdict(place)}

    def begin(self, task: Task) -> None:
        """Note the task of a gang that has just been started. Workers of earlier attempts work for it, too."""
        self._task = task.of_rollout_worker()
        self.forget(task.attempt)

    def forget(self, before: int) -> None:
        """Forget the work of attempts before this one. A worker that took it would look for weights that are gone."""
        if self._queue is not None:
            self._queue.begin(before)

    @property
    def running(self) -> tuple[RankStatus, ...]:
        """The workers whose processes run, as they were last seen."""
        return tuple(worker.rank for worker in self._workers if worker.rank is not None)

    def held(self) -> int:
        """Return how many workers they occupy on the cluster."""
        return sum(worker.gang.held() for worker in self._workers)

    def news(self, phase: Phase) -> list[str]:
        """Return a line for each thing that happened since the last call and that a user should know.

        Returns nothing in phases other than BEGINS, where an event would look like the begin of the phase.
        """
        if phase not in BEGINS:
            return []
        news, self._news = self._news, []
        return news

    def follow(self, wanted: int) -> None:
        """Start or stop workers until there are so many. Returns at once; later calls place and start them."""
        if self._queue is None or self._task is None:
            return
        if len(self._workers) > wanted:
            # Those that are not started yet go first, and then the youngest.
            ordered = sorted(self._workers, key=lambda worker: worker.rank is None)
            for worker in ordered[wanted:]:
                self._end(worker)
        while len(self._workers) < wanted:
            self._made += 1
            worker = _Worker(self._made, self._cluster.gang())
            worker.gang.prewarm(1, self._bundle, ENTRY)
            self._workers = (*self._workers, worker)
        for worker in self._workers:
            if worker.rank is None:
                self._start(worker, self._task)

    def _start(self, worker: _Worker, task: Task) -> None:
        """Start a worker's process if its place is ready."""
        worker.gang.poll(0)
        if not worker.gang.ready():
            return
        output = output_of_rollouts(self._run, worker.number)
        try:
            worker.gang.start(1, self._bundle, ENTRY, task.to_json(), output=output)
        except TimeoutError:
            self._end(worker)  # the next call asks for another place
            return
        (worker.rank,) = worker.gang.poll(0).ranks
        worker.moved = time.monotonic()
        if worker.rank.node not in {server["node"] for server in self._servers}:
            self._start_servers()
        self._order_servers()

    def _start_servers(self) -> None:
        self._servers = self._services.ensure_running()
        self._order_servers()

    def _order_servers(self) -> None:
        """Name the servers that get weights: those on nodes of workers, or else the first one."""
        assert self._queue is not None
        nodes = {rank.node for rank in self.running}
        self._queue.servers = [
            server for server in self._servers if server["node"] in nodes
        ] or self._servers[:1]

    def look(self) -> tuple[Failure, ...]:
        """Poll the workers, remove those that have failed or will be taken away, and return the failures."""
        failures = []
        for worker in [worker for worker in self._workers if worker.rank is not None]:
            status = worker.gang.poll(0)
            (rank,) = status.ranks
            if rank.evaluated_batches != worker.batches:
                worker.batches = rank.evaluated_batches
                worker.moved = self.moved = status.at
            if rank.waiting:
                worker.moved = status.at
            worker.rank = rank
            fault = first_fault(
                Vitals(
                    now=status.at,
                    ranks=(rank,),
                    step=rank.step,
                    moved=worker.moved,
                    suspected=0.0,
                    longest_step=LONGEST_STEP,
                    gap=status.gap,
                    starting=True,  # the first token of a unit may take as long as a first step
                    ending=False,
                    limits=self._limits,
                )
            )
            where = f"rollout worker {worker.number} on {rank.node}"
            if fault is None and rank.state == "done":
                fault = Failure(status.at, rank.step, where, "its process ended")
            if fault is not None:
                failures.append(dataclasses.replace(fault, where=where, rank=-1))
                self._news.append(f"{failures[-1].text}; others generate its answers")
            if fault is not None or rank.leaving:
                self._end(worker)
        return tuple(failures)

    def _end(self, worker: _Worker) -> None:
        self._workers = tuple(other for other in self._workers if other is not worker)
        worker.gang.close()
        if worker.rank is not None and self._queue is not None:
            self._queue.forget(worker_name(worker.rank.node, worker.rank.pid))
            self._order_servers()

    def close(self) -> None:
        """End all workers and servers, and free what they occupy."""
        for worker in self._workers:
            worker.gang.close()
        self._workers = ()
        if self._queue is not None:
            self._services.stop()
            self._queue.close()

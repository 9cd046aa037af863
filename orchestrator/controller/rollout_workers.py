"""The rollout workers of a run, the queue through which ranks reach them, and the servers of weights.

The teacher workers of a run live in the same way. They need no servers of weights: a teacher never changes.

`decide` says how many there are. Each is a gang of one, so that one comes or goes without the others. What it was
generating when it goes, another one generates again, and the answers are the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from cluster.workers.cluster import Cluster, NodeServices
from cluster.workers.device_limits import DeviceLimits
from cluster.workers.gang import Bundle, Gang, RankStatus, workers_text
from orchestrator.config.resources import Workers
from orchestrator.controller.config import LimitSpec
from orchestrator.controller.decide import BEGINS
from orchestrator.controller.health import Failure, Vitals, first_fault
from orchestrator.controller.news import News
from orchestrator.controller.rollout_changes import RolloutChanges
from orchestrator.controller.state import Phase
from orchestrator.observe.rank_log import output_of_extra_worker
from orchestrator.train.rollouts.work_queue import RolloutQueue, worker_name
from orchestrator.train.task import ENTRY, WEIGHT_SERVER, RolloutAddress, Task

LONGEST_STEP = 10.0
"""Stands for the least of a gang's longest step, in seconds, where it is judged whether a worker is silent or hangs."""
COPIES = 2
"""Nodes that have the weights, where there are so many."""


@dataclass
class _Worker:
    """A rollout worker.

    Attributes:
        number: its number; no two of a controller have the same.
        gang: its gang.
        rank: how it was last seen; None before its process runs.
        batches: how much it had generated when it was last seen.
        moved: the monotonic time of its last progress, or of its last wait for work.
        longest: the longest time between two tokens, in seconds.
        avoid: the nodes that its place is not on.
    """

    number: int
    gang: Gang
    avoid: frozenset[str] = frozenset()
    rank: RankStatus | None = None
    batches: int = 0
    moved: float = 0.0
    longest: float = LONGEST_STEP


class RolloutWorkers:
    """The rollout workers, or the teacher workers, of one run; none if `requested` is None.

    Attributes:
        changes: how many run, and their price.
        moved: the monotonic time at which one of them last generated a token; 0 before.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: str,
        requested: Workers | None,
        bundle: Bundle,
        limits: DeviceLimits,
        prices: LimitSpec,
        kind: str = "rollout",
    ) -> None:
        """Start no worker yet.

        Args:
            cluster: where to run.
            run: the URI of the run directory.
            requested: how many the job asks for; None if the ranks generate answers themselves.
            bundle: what a worker occupies.
            limits: the time limits of a worker.
            prices: the limits of the job, with its prices.
            kind: "rollout" or "teacher".
        """
        self._cluster = cluster
        self._kind = kind
        self._run = run
        self._bundle = bundle
        self._limits = limits
        self._workers: tuple[_Worker, ...] = ()
        """Replaced and never modified, because `status` reads it from another thread."""
        self._made = 0
        self._task: Task | None = None
        self._news = News()
        self.changes = RolloutChanges(prices, cluster.machines)
        self._failures: tuple[Failure, ...] = ()
        self._rank_nodes: Set[str] = frozenset()
        """Nodes of ranks."""
        self._avoid: Set[str] = frozenset()
        self._lost: Set[str] = frozenset()
        self.moved = 0.0
        self._queue: RolloutQueue | None = None
        self._services: NodeServices | None = None
        """Starts the servers of weights; None for teacher workers, which need none."""
        self._servers: list[dict[str, str]] = []
        if requested is not None:
            self._queue = RolloutQueue(cluster.host())
            if kind == "rollout":
                self._services = cluster.services(WEIGHT_SERVER, self._queue.token)

    def task_fields(self) -> dict[str, Any]:
        """Start missing servers of weights, and return the fields of a `Task` that name the place of work."""
        if self._queue is None:
            return {}
        self._start_servers()
        rollout_address = RolloutAddress(
            self._queue.address, self._queue.token, weights_token=self._queue.token
        )
        return {"rollouts": dataclasses.asdict(rollout_address)}

    def begin(self, task: Task) -> None:
        """Note the task of a gang that has just been started. Workers of earlier attempts work for it, too."""
        self._task = task.for_rollout_worker()
        self.forget(task.attempt)

    def forget(self, before: int) -> None:
        """Forget the work of attempts before this one. A worker that took it would look for weights that are gone."""
        if self._queue is not None:
            self._queue.begin(before)

    @property
    def running(self) -> tuple[RankStatus, ...]:
        """The workers whose processes run, as they were last seen."""
        return tuple(worker.rank for worker in self._workers if worker.rank is not None)

    @property
    def done(self) -> int:
        """How many units of work they have finished."""
        return self._queue.done if self._queue is not None else 0

    @property
    def are_finished(self) -> bool:
        """Whether the ranks need nothing more of them."""
        return self._queue is not None and self._queue.is_finished

    def occupied_workers(self, avoid: Set[str] = frozenset()) -> int:
        """Return how many workers they occupy on the cluster, without those that may be on nodes of `avoid`."""
        return sum(worker.gang.occupied_workers() for worker in self._workers if not _is_on(worker, avoid))

    def with_failures(self, gang_failures: Sequence[Failure], since: float) -> list[Failure]:
        """Return failures of gangs with those of rollout workers from `since` on, by time, each once."""
        self._failures = tuple(failure for failure in self._failures if failure.time >= since)
        distinct = {(failure.time, failure.node): failure for failure in (*gang_failures, *self._failures)}
        return sorted(distinct.values(), key=lambda failure: failure.time)

    def follow(
        self,
        wanted: int,
        avoid: Set[str] = frozenset(),
        rank_nodes: Set[str] = frozenset(),
        lost: Set[str] = frozenset(),
    ) -> None:
        """Start or stop workers until there are so many. Returns at once; later calls place and start them.

        Args:
            wanted: how many.
            avoid: addresses of nodes that get none. Those that are there end.
            rank_nodes: addresses of the nodes of ranks.
            lost: addresses of nodes that do not answer.
        """
        if self._queue is None or self._task is None:
            return
        for worker in [worker for worker in self._workers if _is_on(worker, avoid)]:
            self._end(worker)
        if (avoid, rank_nodes, lost) != (self._avoid, self._rank_nodes, self._lost):
            self._avoid = avoid
            self._rank_nodes = rank_nodes
            self._lost = lost
            self._order_servers()
        if len(self._workers) > wanted:
            # Those that are not started yet go first, and then the youngest.
            ordered = sorted(self._workers, key=lambda worker: worker.rank is None)
            for worker in ordered[wanted:]:
                self._end(worker)
        while len(self._workers) < wanted:
            self._made += 1
            worker = _Worker(self._made, self._cluster.gang(), frozenset(avoid), longest=LONGEST_STEP)
            worker.gang.prewarm(1, self._bundle, ENTRY, avoid=avoid)
            self._workers = (*self._workers, worker)
        for worker in self._workers:
            if worker.rank is None:
                self._start(worker, self._task)

    def take_news(self, rank_nodes: Set[str], phase: Phase) -> list[str]:
        """Return lines for events: failures of workers since the last call, or how many run if that has changed.

        Args:
            rank_nodes: addresses of the nodes of ranks.
            phase: the phase of the run. Lines wait for one in which a background evaluation may begin.
        """
        running = [rank.node for rank in self.running]
        self.changes.see(running, rank_nodes)
        lines = self._news.take(phase)
        if not lines and self.changes.are_waiting and phase in BEGINS:
            return [f"{workers_text(len(running), self._kind)} run{'s' * (len(running) == 1)}"]
        return lines

    def _start(self, worker: _Worker, task: Task) -> None:
        """Start a worker's process if its place is ready."""
        worker.gang.poll(0)
        if not worker.gang.ready():
            return
        output = output_of_extra_worker(self._run, self._kind, worker.number)
        try:
            worker.gang.start(1, self._bundle, ENTRY, task.to_json(), avoid=worker.avoid, output=output)
        except TimeoutError:
            self._end(worker)  # the next call asks for another place
            return
        (worker.rank,) = worker.gang.poll(0).ranks
        worker.moved = time.monotonic()
        if worker.rank.node not in {server["node"] for server in self._servers}:
            self._start_servers()
        self._order_servers()

    def _start_servers(self) -> None:
        if self._services is not None:
            self._servers = self._services.ensure_running()
            self._order_servers()

    def _order_servers(self) -> None:
        """Name the servers that get weights: those on nodes of workers, and as many others as make two.

        Others are on nodes of ranks if possible. The loss of one node then loses no weights.
        """
        assert self._queue is not None
        nodes = {rank.node for rank in self.running}
        answering = [server for server in self._servers if server["node"] not in self._lost]
        usable = [server for server in answering if server["node"] not in self._avoid] or answering
        needed = [server for server in usable if server["node"] in nodes]
        others_usable = sorted(
            (server for server in usable if server["node"] not in nodes),
            key=lambda server: server["node"] not in self._rank_nodes,
        )
        self._queue.servers = needed + others_usable[: max(COPIES - len(needed), 0)]

    def look(self) -> tuple[Failure, ...]:
        """Poll the workers, remove those that have failed or will be taken away, and return the failures."""
        failures = []
        for worker in [worker for worker in self._workers if worker.rank is not None]:
            status = worker.gang.poll(0)
            (rank,) = status.ranks
            if rank.evaluated_batches != worker.batches:
                if worker.batches:
                    worker.longest = max(worker.longest, status.at - worker.moved)
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
                    longest_step=worker.longest,
                    gap=status.gap,
                    # A unit begins with a sign of life; the first token after the first of them may need a compilation.
                    starting=worker.batches <= 1,
                    ending=False,
                    limits=self._limits,
                )
            )
            where = f"{self._kind} worker {worker.number} on {rank.node}"
            if fault is None and rank.state == "done":
                fault = Failure(status.at, rank.step, where, "its process ended")
            if fault is not None:
                # Else the ranks that waited for this worker would count as hanging, too.
                self.moved = max(self.moved, status.at)
                if fault.cause.end == "lost":
                    # Perhaps with its node. A worker that starts there finds the server again.
                    self._servers = [server for server in self._servers if server["node"] != rank.node]
                failures.append(dataclasses.replace(fault, where=where, rank=-1))
                rest = (
                    "others generate its answers"
                    if self._kind == "rollout"
                    else "its logits are computed again"
                )
                self._news.add(f"{failures[-1].text}; {rest}")
            if fault is not None or rank.leaving:
                self._end(worker)
        # That the weights are gone is no fault of the node that looked for them.
        self._failures += tuple(failure for failure in failures if failure.cause.name != "NoWeights")
        return tuple(failures)

    def _end(self, worker: _Worker) -> None:
        self._workers = tuple(other for other in self._workers if other is not worker)
        worker.gang.close()
        if worker.rank is not None and self._queue is not None:
            self._queue.forget(worker_name(worker.rank.node, worker.rank.pid))
            self._order_servers()

    def leave(self, addresses: Set[str]) -> None:
        """Stop the servers of weights on these nodes, and never start any there again."""
        if self._services is not None:
            self._services.leave(addresses)

    def give_back(self) -> None:
        """End all workers and servers of weights, which the next call of `task_fields` starts again."""
        for worker in self._workers:
            self._end(worker)
        self._task = None
        if self._services is not None:
            self._services.stop()
            self._servers = []
            self._order_servers()

    def close(self) -> None:
        """End all workers and servers, and free what they occupy."""
        for worker in self._workers:
            worker.gang.close()
        self._workers = ()
        if self._services is not None:
            self._services.stop()
        if self._queue is not None:
            self._queue.close()


def _is_on(worker: _Worker, avoid: Set[str]) -> bool:
    """Whether a worker is on one of these nodes, or may get a place there."""
    return worker.rank.node in avoid if worker.rank is not None else not avoid <= worker.avoid

"""The workers of a run: its gang, its snapshot servers and its preemption services."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

from cluster.workers.cluster import Cluster
from cluster.workers.gang import FINISHED, Bundle, Gang, GangStatus, RankStatus
from cluster.workers.hang_report import HangReport
from cluster.workers.rank_output import last_lines
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.redact import redact
from orchestrator.controller.hang_diagnosis import missing_ranks
from orchestrator.controller.health import Failure, excluded
from orchestrator.controller.snapshot_servers import SnapshotServers
from orchestrator.controller.state import Phase
from orchestrator.controller.stragglers import Stragglers
from orchestrator.controller.wrong_nodes import WrongNodes
from orchestrator.observe.rank_log import output_of_attempt
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.demand import Demand
from orchestrator.storage.background_reader import BackgroundReader
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import PREEMPTION_NOTICES, Task, entry_of

COUNT_EVERY = 2.0
"""Seconds between two counts while ranks run."""


class Capacity:
    """Counts the workers that could run, for ranks of one size.

    Attributes:
        avoid: addresses of nodes that get no ranks because too many have failed there, or because they compute wrongly.
            The former are avoided only while the others have room for `least` workers.
        last: the last count; 0 before.
    """

    def __init__(self, gang: Gang, bundle: Bundle, min_workers: int) -> None:
        self._gang = gang
        self._bundle = bundle
        self._min_workers = min_workers
        self.last = 0
        self._counted_at = 0.0
        self.avoid: Set[str] = frozenset()

    def count(
        self,
        phase: Phase,
        failures: Sequence[Failure],
        now: float,
        other_workers: Callable[[Set[str]], int],
        wrong: frozenset[str] = frozenset(),
    ) -> int:
        """Return how many workers could run. In phases in which it does not matter, return the last count.

        Args:
            phase: the phase of the run.
            failures: recent faults, which say what nodes to avoid.
            now: monotonic time, in seconds.
            other_workers: gets the nodes to avoid, and returns how many workers the run has on other nodes besides its
                gang. The count includes them.
            wrong: addresses of nodes that compute wrongly. They are avoided even if the others have too little room.
        """
        waited = time.monotonic() - self._counted_at
        if phase == "wait" or (phase in ("train", "evaluate") and waited > COUNT_EVERY):
            self._counted_at = time.monotonic()
            self.avoid = excluded(failures, now) | wrong
            self.last = self._gang.capacity(self._bundle, self.avoid) + other_workers(self.avoid)
            if self.avoid != wrong and self.last < self._min_workers:
                self.avoid = wrong
                self.last = self._gang.capacity(self._bundle, wrong) + other_workers(wrong)
        return self.last


REQUEST = "profiles/request.json"
"""The latest profile request: {"id", "ranks", "steps"}. Results go to the folder next to it that is named by the id."""
WAITS = 30.0
"""Seconds that the end of a run waits at most for a read that storage does not answer."""


class ProfileRequests:
    """Reads profile requests from the run directory in a background thread. Returns each request once."""

    def __init__(self, run: RunDir) -> None:
        """Start without a request: one that is already there was meant for an earlier controller."""
        self._is_first_read = True
        self._last_id = ""
        """The id of the last request that was read."""
        self._new: dict[str, Any] = {}
        """The request that `take` has not returned yet."""
        self._reader = BackgroundReader(run, REQUEST, self._received)

    def take(self) -> dict[str, Any] | None:
        """Return the request that arrived since the last call, None without one. Does not wait for storage."""
        self._reader.look()
        request, self._new = self._new, {}
        return request or None

    def close(self) -> None:
        """Stop reading."""
        self._reader.close(WAITS)

    def _received(self, request: dict[str, Any]) -> None:
        is_first, self._is_first_read = self._is_first_read, False
        if request.get("id") in (None, self._last_id) or not isinstance(request.get("ranks"), list):
            return
        self._last_id = str(request["id"])
        if not is_first and isinstance(request.get("steps"), int):
            self._new = request


DUMP = 0.5
"""Seconds that the ranks of a hanging gang have to print their stacks before they are killed."""
ANSWERS = 10.0
"""Seconds to wait for the answers of ranks that live to the question what they wait for, if they take longer: on a busy
machine a healthy rank may need several."""
POLL = 0.1
"""Seconds between two polls of a gang without news."""


class Workers:
    """The gangs of a run, one after another, with its snapshot servers and the services that report preemption.

    Attributes:
        bundle: what one rank occupies.
        running: whether ranks run.
        status: the last observation of the gang.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: RunDir,
        demand: Demand,
        checkpoint: CheckpointSpec,
        model: str,
        generating: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            cluster: where to run.
            run: the run directory.
            demand: the workers and the layout that the job asks for, and the size of its state.
            checkpoint: how often snapshots go into the memory of nodes.
            model: the model as the job names it, which says what ranks import.
            generating: how many rollout workers the run needs in addition to these workers.
        """
        self._generating = generating
        self._stragglers = Stragglers()
        self._resources = demand.resources
        self._parallel = demand.parallel
        self._model = model
        self._cluster = cluster
        self.bundle = demand.resources.per_worker.bundle
        self.running = False
        self.status = GangStatus()
        self._profiles = ProfileRequests(run)
        self._snapshots = SnapshotServers(checkpoint, demand.optimizer, cluster, demand.pruned)
        source = demand.resources.notices
        self._notices = cluster.services(PREEMPTION_NOTICES, source) if source else None
        self._wrong = WrongNodes(cluster)
        self._gang = cluster.gang()
        self._capacity = self._new_capacity()
        self._asked: tuple[RankStatus, ...] = ()
        """The ranks with their answers to `ask_what_hangs` in the present attempt."""
        self._node_metrics: tuple[dict[str, Any], ...] = ()
        """Readings of nodes that `take_node_metrics` has not returned yet."""

    def _new_capacity(self) -> Capacity:
        min_workers = self._resources.workers.min + self._generating
        return Capacity(self._gang, self.bundle, min_workers=min_workers)

    def _open_gang(self) -> None:
        """Make a new gang after the previous one was closed."""
        self._gang = self._cluster.gang()
        self._capacity = self._new_capacity()

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """The ranks as they were last seen; empty while none runs."""
        return self.status.ranks if self.running else ()

    def snapshots(self, shape: ModelShape) -> dict[str, Any]:
        """Start missing snapshot servers, and return the fields of a `Task` that name them."""
        servers = self._snapshots.ensure_running(shape, self._gang.lost_nodes())
        return {"snapshot_servers": tuple(servers), "snapshot_token": self._snapshots.token}

    def lost_nodes(self) -> frozenset[str]:
        """Addresses of nodes that recently stopped answering."""
        return frozenset(self._gang.lost_nodes())

    def capacity(
        self,
        phase: Phase,
        failures: Sequence[Failure],
        now: float,
        other_workers: Callable[[Set[str]], int],
        wrong: frozenset[str],
    ) -> int:
        """Return how many workers could run, see `Capacity.count`."""
        return self._capacity.count(phase, failures, now, other_workers, wrong)

    @property
    def avoid(self) -> Set[str]:
        """Addresses of nodes that get no workers, see `Capacity`."""
        return self._capacity.avoid

    def ready(self) -> int:
        """Return how many workers have all imports done."""
        return self._gang.ready()

    def poll(self, saved: int, wait: float = POLL) -> tuple[Row, ...]:
        """Observe the ranks and return the rows that they have reported; empty while none runs. See `Gang.poll`."""
        if not self.running:
            return ()
        if request := self._profiles.take():
            self._gang.ask_profile(request)
        self.status = self._gang.poll(saved, wait)
        self._node_metrics = (*self._node_metrics, *self.status.nodes)
        return self.status.rows

    def stragglers_in(self, rows: Sequence[Row]) -> list[str]:
        """Return a line for each rank that has become a straggler with these rows, which the last poll returned."""
        lines = []
        for row in rows:
            if straggler := self._stragglers.see(row.get("busy_seconds", ())):
                rank, ratio = straggler
                node = self.ranks[rank].node
                times = f"its busy time per step is {ratio:.1f} times the median rank's"
                lines.append(f"rank {rank} on {node} is a straggler: {times}")
        return lines

    def take_node_metrics(self) -> tuple[dict[str, Any], ...]:
        """Return the readings of nodes that arrived since the last call, see `GangStatus.nodes`."""
        node_metrics, self._node_metrics = self._node_metrics, ()
        return node_metrics

    def start(self, layout: Layout, task: Task) -> None:
        """Start a gang on a task. The output of its ranks goes to the run directory.

        Args:
            layout: the layout, which gives the number of ranks and the engine.
            task: the task of every rank.

        Raises:
            TimeoutError: the ranks cannot be placed. No rank is left running.
        """
        self.status, self._asked = GangStatus(), ()
        if self._notices is not None:
            self._notices.ensure_running()
        try:
            self._gang.start(
                layout.world,
                self.bundle,
                target=entry_of(layout.engine, self._model),
                config=task.to_json(),
                ranks_per_group=layout.tp,
                avoid=self._capacity.avoid,
                output=output_of_attempt(task.run, task.attempt),
            )
            self.running = True
            self.prewarm(layout.world)
        except TimeoutError:
            self.stop()
            raise

    def printed(self, fault: Failure | None) -> list[str]:
        """Return the last lines that the rank at fault printed, without secrets.

        If no rank is known to be at fault, these are the lines of rank 0. For a hanging gang that was asked by
        `ask_what_hangs` they are the Python stacks of a rank that is alive; before them is a line for each rank that
        the others wait for.
        """
        if fault is None or fault.cause.end == "lost":
            return []  # the output is lost with its node, and asking for it would wait
        rank = max(fault.rank, 0)
        if fault.cause.end == "silent":
            rank = int(rank == 0)  # the silent rank is frozen and prints nothing
        missing = missing_ranks(self._asked, silent=fault.cause.end == "silent") if fault.is_hang else []
        return [
            *(missing_rank.text for missing_rank in missing),
            *last_lines(redact(self._gang.output(rank))),
        ]

    def ask_what_hangs(self, poll: Callable[[], None]) -> GangStatus:
        """Ask the ranks of a gang that seems to hang what they wait for, and make them print their stacks.

        Args:
            poll: polls this gang once, and stores the rows that it returns.

        Returns:
            The gang after that, with the ranks' answers. A rank that has sent a heartbeat since, but no answer, has a
            report that says so.
        """
        status, asked_at = self.status, time.monotonic()
        # Ranks that have been silent for a while will not answer either, and a recovery should not wait for them,
        # unless they are heard of again.
        recent = status.at - max(self.bundle.limits.silence / 2, status.gap)
        self._gang.print_stacks()
        waited = 0.0
        while waited < DUMP or (waited < ANSWERS and self._are_awaited(recent)):
            poll()
            waited = time.monotonic() - asked_at
        self._asked = tuple(
            dataclasses.replace(rank, hang=_answer(rank, asked_at)) for rank in self.status.ranks
        )
        return dataclasses.replace(self.status, ranks=self._asked)

    def _are_awaited(self, recent: float) -> bool:
        """Whether a rank that has been heard of since `recent` still runs and has not answered."""
        ranks = (rank for rank in self.status.ranks if rank.state not in FINISHED)
        return any(rank.hang is None and rank.last_heartbeat >= recent for rank in ranks)

    def drain(self, wrong: Set[str]) -> list[str]:
        """Leave nodes that compute wrongly and drain them, see `WrongNodes.drain`. Call it again and again.

        Ray drains only idle nodes, so everything that the run has there ends, and for a new node all workers too.
        """
        if new := wrong - self._wrong.reported:
            self._snapshots.leave(new)
            if self._notices is not None:
                self._notices.leave(new)
            if not self.running:
                self.give_back_processors()
        return self._wrong.drain(wrong)

    def prewarm_first(self, workers: int) -> None:
        """Start the imports of `workers` workers before there is a layout.

        Does nothing if the job pins a layout whose ranks share nodes or run another engine.
        """
        pinned = self._parallel
        fits = pinned == "auto" or ((pinned.tp or 1) == 1 and pinned.engine in (None, "torch"))
        if fits and not (self.running or self._gang.occupied_workers()):
            if self._generating:  # which need their room while these imports go on
                workers = min(workers, max(self._gang.capacity(self.bundle) - self._generating, 0))
            self._gang.prewarm(workers, self.bundle, entry_of("torch", self._model))

    def prewarm(self, workers: int) -> None:
        """Keep `workers` workers and the job's spares ready, as far as there is room. Rollout workers come first."""
        spares = self._resources.spares
        if self._generating:
            spares = min(spares, max(self._capacity.last - workers - self._generating, 0))
        self._gang.prewarm(workers + spares)

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary; safe from other threads."""
        self._gang.request_stop()

    def want(self, workers: int) -> None:
        """Tell the cluster how many workers the run can use, so that an autoscaling cluster grows."""
        self._cluster.request_workers(self.bundle, workers)

    def machines(self) -> list[dict[str, str]]:
        """Return the machines of the ranks: type, market and zone of each."""
        return self._cluster.machines(sorted({rank.node for rank in self.ranks}))

    def stop(self) -> None:
        """Kill the ranks. Their workers stay ready for the next start."""
        self.running = False
        self._gang.stop()

    def free(self) -> None:
        """Kill the ranks and free their resources. No gang can be started after this."""
        self.running = False
        self._gang.close()

    def give_back(self) -> None:
        """Free everything that the run holds on the cluster. A gang can still be started later."""
        self.free()
        self._snapshots.stop()
        self._open_gang()

    def give_back_processors(self) -> None:
        """Free the resources of the workers. A gang can still be started later."""
        if self._gang.occupied_workers():
            self.free()
            self._open_gang()

    def close(self) -> None:
        """Kill the ranks and stop every service."""
        self.free()
        self._profiles.close()
        self._snapshots.stop()
        if self._notices is not None:
            self._notices.stop()


def _answer(rank: RankStatus, asked_at: float) -> HangReport | None:
    """Return the answer of a rank; if it has none, whether it has been heard of since it was asked."""
    if rank.hang is None and rank.last_heartbeat > asked_at:
        return HangReport(is_overdue=True)
    return rank.hang

"""The workers of a run: its gang, its snapshot servers and its preemption services."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, cast

from cluster.workers.cluster import Cluster
from cluster.workers.gang import Bundle, Gang, GangStatus, RankStatus
from cluster.workers.rank_output import last_lines
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.snapshot_server import LIMIT
from orchestrator.config.redact import redact
from orchestrator.config.spec import JobSpec, dump
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.controller.health import Failure, excluded
from orchestrator.controller.state import Phase
from orchestrator.observe.rank_log import output_of_attempt
from orchestrator.optim.config import OptimizerSpec
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.demand import demand_of
from orchestrator.planner.host_memory import check_workers_memory, state_bytes
from orchestrator.planner.machines import machine_for
from orchestrator.planner.planner import Planner
from orchestrator.resolve.base import Base
from orchestrator.resolve.continued import Source
from orchestrator.resolve.pinned_base import not_held
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.training_inputs import Beginning, shape_over
from orchestrator.storage.background_reader import BackgroundReader
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY, ENTRY_OF, PREEMPTION_NOTICES, SNAPSHOT_SERVER, Task
from workloads.hf.hf_config import FolderConfig

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


HELD = 2 + 1
"""Snapshots that the servers keep at the same time: two generations, and the one that arrives."""


class SnapshotServers:
    """The snapshot servers of one run, one on each node. Clients authenticate with `token`."""

    def __init__(
        self, checkpoint: CheckpointSpec, optimizer: OptimizerSpec, cluster: Cluster, pruned: float = 0.0
    ) -> None:
        """`pruned` is as in `state_bytes`."""
        self._pruned = pruned
        self._every = checkpoint.snapshot_every
        self._ema = checkpoint.ema
        self._optimizer = optimizer
        self.token = secrets.token_hex(16)
        self._services = cluster.services(SNAPSHOT_SERVER, self.token) if self._every else None

    def places(self, shape: ModelShape, lost: Set[str] = frozenset()) -> list[dict[str, str]]:
        """Start missing servers, and return {"node", "address"} of each.

        With `snapshot_every: auto` the result is empty on a single node, whose loss would take the snapshots along, and
        on nodes without enough memory.

        Args:
            shape: the model, which says how large a snapshot is.
            lost: addresses of nodes to leave out, because they do not answer; Ray may not know that yet.
        """
        if self._services is None:
            return []
        is_auto = self._every == "auto"
        servers = self._services.ensure_running(min_nodes=2 if is_auto else 1)
        servers = [server for server in servers if server["node"] not in lost]
        state = state_bytes(self._optimizer, self._ema, shape, pruned=self._pruned)
        fits = HELD * state <= LIMIT * len(servers)
        return servers if fits or not is_auto else []

    def stop(self) -> None:
        """Stop the servers."""
        if self._services is not None:
            self._services.stop()


COUNT_EVERY = 2.0
"""Seconds between two counts while ranks run."""


class Capacity:
    """Counts the workers that could run, for ranks of one size.

    Attributes:
        avoid: addresses of nodes that get no ranks because too many have failed there. Nodes are avoided only while the
            others have room for `least` ranks.
    """

    def __init__(self, gang: Gang, bundle: Bundle, least: int) -> None:
        self._gang = gang
        self._bundle = bundle
        self._least = least
        self._count = 0
        self._counted_at = 0.0
        self.avoid: Set[str] = frozenset()

    def count(self, phase: Phase, failures: Sequence[Failure], now: float, beside: Callable[[], int]) -> int:
        """Return how many workers could run. In phases in which it does not matter, return the last count.

        Args:
            phase: the phase of the run.
            failures: recent faults, which say what nodes to avoid.
            now: monotonic time.
            beside: returns how many workers an evaluation beside the run occupies; they are included.
        """
        waited = time.monotonic() - self._counted_at
        if phase == "wait" or (phase in ("train", "evaluate") and waited > COUNT_EVERY):
            self._counted_at = time.monotonic()
            self.avoid = excluded(failures, now)
            occupied = beside()
            self._count = self._gang.capacity(self._bundle, self.avoid) + occupied
            if self.avoid and self._count < self._least:
                self.avoid = frozenset()
                self._count = self._gang.capacity(self._bundle) + occupied
        return self._count


DUMP = 0.5
"""Seconds that the ranks of a hanging gang have to print their stacks before they are killed."""
POLL = 0.1
"""Seconds between two polls of a gang without news."""


class Workers:
    """The gangs of a run, one after another, with its snapshot servers and the services that report preemption.

    Attributes:
        bundle: what one rank occupies.
        running: whether ranks run.
        status: the last observation of the gang.
    """

    def __init__(self, spec: JobSpec, cluster: Cluster, run: RunDir) -> None:
        self._spec = spec
        self._cluster = cluster
        self._run = run
        self.bundle = spec.resources.per_worker.bundle
        self.running = False
        self.status = GangStatus()
        self._profiles = ProfileRequests(run)
        self._snapshots = SnapshotServers(spec.checkpoint, spec.train.optimizer, cluster, spec.pruned_bytes)
        source = spec.resources.notices
        self._notices = cluster.services(PREEMPTION_NOTICES, source) if source else None
        self._gang = cluster.gang()
        self._capacity = self._new_capacity()
        self._readings: tuple[dict[str, Any], ...] = ()
        """Readings of nodes that `take_readings` has not returned yet."""

    def _new_capacity(self) -> Capacity:
        return Capacity(self._gang, self.bundle, least=self._spec.resources.workers.min)

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
        servers = self._snapshots.places(shape, self._gang.lost_nodes())
        return {"snapshot_servers": tuple(servers), "snapshot_token": self._snapshots.token}

    def lost_nodes(self) -> frozenset[str]:
        """Addresses of nodes that recently stopped answering."""
        return frozenset(self._gang.lost_nodes())

    def capacity(
        self, phase: Phase, failures: Sequence[Failure], now: float, beside: Callable[[], int]
    ) -> int:
        """Return how many workers could run, see `Capacity.count`."""
        return self._capacity.count(phase, failures, now, beside)

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
        self._readings = (*self._readings, *self.status.nodes)
        return self.status.rows

    def take_readings(self) -> tuple[dict[str, Any], ...]:
        """Return the readings of nodes that arrived since the last call, see `GangStatus.nodes`."""
        readings, self._readings = self._readings, ()
        return readings

    def start(self, layout: Layout, task: Task) -> None:
        """Start a gang on a task. The output of its ranks goes to the run directory.

        Args:
            layout: the layout, which gives the number of ranks and the engine.
            task: the task of every rank.

        Raises:
            TimeoutError: the ranks cannot be placed. No rank is left running.
        """
        self.status = GangStatus()
        if self._notices is not None:
            self._notices.ensure_running()
        try:
            self._gang.start(
                layout.world,
                self.bundle,
                target=ENTRY_OF[layout.engine],
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

        If no rank is known to be at fault, these are the lines of rank 0. For a hanging gang they are the Python stacks
        of a rank that is alive, which show what it waits for.
        """
        if fault is None or fault.cause.end == "lost":
            return []  # the output is lost with its node, and asking for it would wait
        rank = max(fault.rank, 0)
        if fault.cause.end in ("silent", "still"):
            self._gang.print_stacks()
            time.sleep(DUMP)
        if fault.cause.end == "silent":
            rank = int(rank == 0)  # the silent rank is frozen and prints nothing
        return last_lines(redact(self._gang.output(rank)))

    def prewarm_first(self, workers: int) -> None:
        """Start the imports of `workers` workers before there is a layout.

        Does nothing if the job pins a layout whose ranks share nodes or run another engine.
        """
        pinned = self._spec.parallel
        fits = pinned == "auto" or ((pinned.tp or 1) == 1 and ENTRY_OF[pinned.engine or "torch"] == ENTRY)
        if fits and not (self.running or self._gang.held()):
            self._gang.prewarm(workers, self.bundle, ENTRY)

    def prewarm(self, workers: int) -> None:
        """Keep `workers` workers and the job's spares ready, as far as there is room."""
        self._gang.prewarm(workers + self._spec.resources.spares)

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary; safe from other threads."""
        self._gang.request_stop()

    def want(self, workers: int) -> None:
        """Tell the cluster how many workers the run can use, so that an autoscaling cluster grows."""
        self._cluster.request_workers(self.bundle, workers)

    def machines(self) -> list[dict[str, str]]:
        """Return the machines of the ranks: type, market and zone of each."""
        return self._cluster.machines(sorted({rank.node for rank in self.ranks}))

    def resolved(
        self, data: PreparedData, base: Base | None, source: Source | None, kept: FolderConfig | None
    ) -> tuple[ModelShape, FolderConfig | None, str, list[str]]:
        """Return the model's shape, the folder's configuration, the digest of the token shards, and notes.

        See `shape_over`. It runs through the cluster because it imports torch, which a process there may have done.
        """
        result = self._cluster.call(shape_over, self._spec, data, Beginning(base, source), kept)
        shape, kept, shards, notes = cast("tuple[ModelShape, FolderConfig | None, str, list[str]]", result)
        return shape, kept, shards, [*notes, *not_held(base, self._run)]

    def planner(self, shape: ModelShape, is_stopped: Callable[[], bool]) -> Planner:
        """Return a planner for the smallest of the workers.

        Args:
            shape: the model.
            is_stopped: returns whether the run is to stop, which ends traces of layouts.

        Raises:
            InputError: the host memory of the workers cannot hold the training state that a commit saves.
        """
        offer = self._cluster.offer(self.bundle, self._spec.resources.workers.max)
        if offer:
            state = state_bytes(
                self._spec.train.optimizer, self._spec.checkpoint.ema, shape, pruned=self._spec.pruned_bytes
            )
            check_workers_memory(self._spec.resources, state, offer.memory)
        machine = machine_for(offer, self.bundle, self._spec.train.dtype)
        return Planner(
            demand_of(self._spec),
            shape,
            machine,
            host=offer.memory if offer else None,
            confirm=partial(verdicts_before, dump(self._spec), machine, is_stopped),
            is_busy=lambda: self.running,
        )

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
        if self._gang.held():
            self.free()
            self._open_gang()

    def close(self) -> None:
        """Kill the ranks and stop every service."""
        self.free()
        self._profiles.close()
        self._snapshots.stop()
        if self._notices is not None:
            self._notices.stop()

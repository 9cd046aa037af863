"""The workers of a run: its gang, and what runs on the nodes beside it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, cast

from cluster.workers.cluster import Cluster
from cluster.workers.gang import Bundle, Gang, GangStatus, RankStatus
from cluster.workers.rank_output import last_lines
from orchestrator.checkpoint.snapshot_server import LIMIT
from orchestrator.config.redact import redact
from orchestrator.config.spec import JobSpec
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.controller.health import Failure, excluded
from orchestrator.controller.state import Phase
from orchestrator.observe.rank_log import output_of_attempt
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.host_memory import check_workers_memory, state_bytes
from orchestrator.planner.machines import machine_for
from orchestrator.planner.planner import Planner
from orchestrator.resolve.base import Base
from orchestrator.resolve.continued import Source
from orchestrator.resolve.pinned_base import not_held
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.training_inputs import shape_over
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY, ENTRY_OF, PREEMPTION_NOTICES, SNAPSHOT_SERVER, Task
from workloads.hf.hf_config import FolderConfig

REQUEST = "profiles/request.json"
"""The last request: {"id", "ranks", "steps"}. Its results are in the folder beside it that has its id."""
EVERY, EVERY_REMOTE = 1.0, 5.0
"""Seconds between looks, on a local file system and at an object store."""
WAITS = 30.0
"""Seconds that the end of a run waits at most for a look at storage that does not answer."""


class ProfileRequests:
    """Looks for requests in a thread of its own; each is given once."""

    def __init__(self, run: RunDir) -> None:
        """A request that is there already is old: whoever made it asked another controller."""
        self._run, self._every = run, EVERY if run.local else EVERY_REMOTE
        self._seen, self._new = "", dict[str, Any]()
        self._first, self._looked = True, 0.0
        self._thread = BackgroundWriter(self._look)

    def take(self) -> dict[str, Any] | None:
        """What was asked for since the last call, None without anything. Returns soon."""
        if time.monotonic() - self._looked >= self._every:
            self._looked = time.monotonic()
            self._thread.request()
        asked, self._new = self._new, {}
        return asked or None

    def close(self) -> None:
        """Look no more."""
        self._thread.close(WAITS)

    def _look(self) -> None:
        try:
            found = self._run.read_json_or_empty(REQUEST)
        except Exception:  # whatever a store raises: the next look may be answered
            return
        first, self._first = self._first, False
        if found.get("id") in (None, self._seen) or not isinstance(found.get("ranks"), list):
            return
        self._seen = str(found["id"])
        if not first and isinstance(found.get("steps"), int):
            self._new = found


HELD = 2 + 1
"""Snapshots that are held at a time: two generations, and the one that arrives."""


class SnapshotServers:
    """The holders of one run. `token` is what they are known by."""

    def __init__(self, spec: JobSpec, cluster: Cluster) -> None:
        self._spec, self._every = spec, spec.checkpoint.snapshot_every
        self.token = secrets.token_hex(16)
        self._services = cluster.services(SNAPSHOT_SERVER, self.token) if self._every else None

    def places(self, shape: ModelShape, lost: Set[str] = frozenset()) -> list[dict[str, str]]:
        """{"node", "address"} of each. Where the job leaves it open, none on a single node, whose loss takes all
        along, and none where they would not have the memory. Not those on nodes that are `lost`, though Ray may not
        know it yet."""
        if self._services is None:
            return []
        open_ = self._every == "auto"
        found = [
            p for p in self._services.ensure_running(min_nodes=2 if open_ else 1) if p["node"] not in lost
        ]
        fits = HELD * state_bytes(self._spec, shape) <= LIMIT * len(found)
        return found if fits or not open_ else []

    def stop(self) -> None:
        """End them."""
        if self._services is not None:
            self._services.stop()


COUNT_EVERY = 2.0
"""Seconds between counts beside running ranks."""


class Capacity:
    """Of a gang, for ranks of that size; nodes are left out in `avoid` only while the others hold `least` ranks."""

    def __init__(self, gang: Gang, bundle: Bundle, least: int) -> None:
        self._gang, self._bundle, self._least = gang, bundle, least
        self._count, self._counted = 0, 0.0
        self.avoid: Set[str] = frozenset()

    def count(self, phase: Phase, failures: Sequence[Failure], now: float, beside: Callable[[], int]) -> int:
        """Workers that could run, those that are held `beside` included; the last count where it does not matter."""
        waited = time.monotonic() - self._counted
        if phase == "wait" or (phase in ("train", "evaluate") and waited > COUNT_EVERY):
            self._counted = time.monotonic()
            self.avoid = excluded(failures, now)
            held = beside()
            self._count = self._gang.capacity(self._bundle, self.avoid) + held
            if self.avoid and self._count < self._least:
                self.avoid, self._count = frozenset(), self._gang.capacity(self._bundle) + held
        return self._count


DUMP = 0.5
"""Seconds that the ranks of a gang that hangs have to tell where, before they are ended."""
POLL = 0.1
"""Seconds between looks at a gang that has no news."""


class Workers:
    """One gang after another, with snapshot servers and the services that hear of preemption.

    `running` says whether ranks run; `ranks` are as they were last seen, none while no ranks run.
    """

    def __init__(self, spec: JobSpec, cluster: Cluster, run: RunDir) -> None:
        self._spec, self._cluster, self._run, self._profiles = spec, cluster, run, ProfileRequests(run)
        self.bundle = spec.resources.per_worker.bundle
        self._snapshots = SnapshotServers(spec, cluster)
        source = spec.resources.notices
        self._notices = cluster.services(PREEMPTION_NOTICES, source) if source else None
        self.running, self.status = False, GangStatus()
        self._readings: tuple[dict[str, Any], ...] = ()
        self._open()

    def _open(self) -> None:
        self._gang = self._cluster.gang()
        self._capacity = Capacity(self._gang, self.bundle, self._spec.resources.workers.min)

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """The ranks that run."""
        return self.status.ranks if self.running else ()

    def snapshots(self, shape: ModelShape) -> dict[str, Any]:
        """What a task says of the snapshot servers, {"node", "address"} each. One that is missing is started."""
        places = self._snapshots.places(shape, self._gang.lost_nodes())
        return {"snapshot_servers": tuple(places), "snapshot_token": self._snapshots.token}

    def lost_nodes(self) -> frozenset[str]:
        """Addresses of nodes that were found to be gone lately."""
        return frozenset(self._gang.lost_nodes())

    def capacity(
        self, phase: Phase, failures: Sequence[Failure], now: float, beside: Callable[[], int]
    ) -> int:
        """How many workers could run, see `Capacity.count`."""
        return self._capacity.count(phase, failures, now, beside)

    def ready(self) -> int:
        """For how many workers all imports are done."""
        return self._gang.ready()

    def poll(self, saved: int, wait: float = POLL) -> tuple[Row, ...]:
        """Observe the ranks, if any run; the rows that they have reported. See `Gang.poll`."""
        if not self.running:
            return ()
        if asked := self._profiles.take():
            self._gang.ask_profile(asked)
        self.status = self._gang.poll(saved, wait)
        self._readings = (*self._readings, *self.status.nodes)
        return self.status.rows

    def take_readings(self) -> tuple[dict[str, Any], ...]:
        """What polls have read of the nodes since the last call, see `GangStatus.nodes`."""
        found, self._readings = self._readings, ()
        return found

    def start(self, layout: Layout, task: Task) -> None:
        """Start a gang on that task; what its ranks print is kept in the run directory. Raises TimeoutError, with no
        rank left running, if it cannot be placed."""
        self.status = GangStatus()
        if self._notices is not None:
            self._notices.ensure_running()
        entry, arguments = ENTRY_OF[layout.engine], task.to_json()
        try:
            avoid, output = self._capacity.avoid, output_of_attempt(task.run, task.attempt)
            self._gang.start(layout.world, self.bundle, entry, arguments, layout.tp, avoid, output)
            self.running = True
            self.prewarm(layout.world)
        except TimeoutError:
            self.stop()
            raise

    def printed(self, fault: Failure | None) -> list[str]:
        """The last lines of the rank at fault, or of the first one if none is known to be. Of a gang that hangs, the
        Python stacks of one that is alive: they say what it waits for. Secrets are hidden."""
        if fault is None or fault.cause.end == "lost":
            return []  # with its node: who asks would wait
        rank = max(fault.rank, 0)
        if fault.cause.end in ("silent", "still"):
            self._gang.print_stacks()
            time.sleep(DUMP)
        if fault.cause.end == "silent":
            rank = int(rank == 0)  # it is frozen, and prints nothing
        return last_lines(redact(self._gang.output(rank)))

    def prewarm_first(self, workers: int) -> None:
        """Begin the imports of so many workers before there is a layout, unless it is known to want others."""
        pinned = self._spec.parallel
        alone = pinned == "auto" or ((pinned.tp or 1) == 1 and ENTRY_OF[pinned.engine or "torch"] == ENTRY)
        if alone and not (self.running or self._gang.held()):
            self._gang.prewarm(workers, self.bundle, ENTRY)

    def prewarm(self, workers: int) -> None:
        """Have so many workers ready, and the job's spares, as far as there is room."""
        self._gang.prewarm(workers + self._spec.resources.spares)

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary; safe from other threads."""
        self._gang.request_stop()

    def want(self, workers: int) -> None:
        """Tell the cluster how many workers the run would use, so that one which can grow does."""
        self._cluster.request_workers(self.bundle, workers)

    def machines(self) -> list[dict[str, str]]:
        """The machines that the ranks are on."""
        return self._cluster.machines(sorted({rank.node for rank in self.ranks}))

    def resolved(
        self, data: PreparedData, base: Base | None, source: Source | None, kept: FolderConfig | None
    ) -> tuple[ModelShape, FolderConfig | None, str, list[str]]:
        """See `shape_over`: it imports torch, which the cluster may have done already."""
        found = self._cluster.call(shape_over, self._spec, data, base, source, kept)
        shape, kept, shards, notes = cast("tuple[ModelShape, FolderConfig | None, str, list[str]]", found)
        return shape, kept, shards, [*notes, *not_held(base, self._run)]

    def planner(self, shape: ModelShape, is_stopped: Callable[[], bool]) -> Planner:
        """Plans by what the least of the workers has; what is traced for that ends when the run `is_stopped`. Raises
        InputError if their memory cannot hold what is saved."""
        offer = self._cluster.offer(self.bundle, self._spec.resources.workers.max)
        if offer:
            check_workers_memory(self._spec, shape, offer.memory)
        machine = machine_for(offer, self.bundle, self._spec.train.dtype)
        confirm = partial(verdicts_before, self._spec, machine, is_stopped)
        host = offer.memory if offer else None
        return Planner(self._spec, shape, machine, host, confirm, lambda: self.running)

    def stop(self) -> None:
        """End the ranks; what they ran in stays ready."""
        self.running = False
        self._gang.stop()

    def free(self) -> None:
        """End the ranks and give back what they occupied; no gang is started any more."""
        self.running = False
        self._gang.close()

    def give_back(self) -> None:
        """Give back all that the run holds on the cluster, until it starts a gang again."""
        self.free()
        self._snapshots.stop()
        self._open()

    def give_back_processors(self) -> None:
        """Give back what its ranks occupied, until it starts a gang again."""
        if self._gang.held():
            self.free()
            self._open()

    def close(self) -> None:
        """End everything."""
        self.free()
        self._profiles.close()
        self._snapshots.stop()
        if self._notices is not None:
            self._notices.stop()

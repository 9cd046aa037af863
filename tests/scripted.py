"""What a gang does to a run directory, without training: steps, rows and commits as the rank program makes them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from fake_gang import Attempt, FakeGang

from cluster.workers.clock import wall
from cluster.workers.cluster import Cluster
from cluster.workers.error_kind import cause_of
from cluster.workers.gang import Cause, GangStatus, RankState, RankStatus
from cluster.workers.injected_faults import FaultSpec
from cluster.workers.machine import Offer
from cluster.workers.rank_process import describe
from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.committer import CommitOutcome
from orchestrator.checkpoint.identity import IDENTITY, SHARDS
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.peer_memory import PeerMemory
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.checkpoint.snapshot_server import SnapshotServer
from orchestrator.checkpoint.snapshot_writer import Placement, SnapshotWriter
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.controller import Controller
from orchestrator.data.samples.receipt import START, roll
from orchestrator.data.samples.skips import merged, start_of
from orchestrator.parallel.layout import Layout
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.instability import NonFinite
from orchestrator.train.task import Task

STEP_SECONDS = 0.002
RAISED = Cause("raised", name="Error")


class ControllerKilled(BaseException):
    """The controller's process is gone: nothing that it would still have done is done."""


@dataclass
class Training:
    """A script for `FakeGang`. It obeys the faults of its task, and gives the same rows for the same steps.

    `polls` is how many steps pass between two looks. `kill_controller_at` ends the controller's process after
    that step and its commit, before anyone hears of it. Commits at the steps of `failing` fail. `gangs` collects
    what was started.
    """

    polls: int = 1
    kill_controller_at: int = 0
    failing: frozenset[int] = frozenset()
    gangs: list[Attempt] = field(default_factory=list)

    def __call__(self, gang: Attempt) -> Iterator[GangStatus]:
        self.gangs.append(gang)
        return self._attempt(gang)

    def _attempt(self, gang: Attempt) -> Iterator[GangStatus]:
        yield beat(gang, "starting")
        task, link = Task(**gang.config), WorkerContext(RankInfo(0, gang.world, 0, "node-0", 0))
        store, snapshots = Store(f"{task.run}/checkpoints"), writer_of(task)
        try:
            step, receipt = restore(store, task)
        except CorruptCommit as error:
            yield beat(
                gang,
                "failed",
                error=describe(error),
                cause=cause_of(error),
                failed_at=time.monotonic(),
            )
            return
        faults, taken, stopped = [FaultSpec.parse(text) for text in task.faults], 0, False
        while step < task.until and not stopped:
            step += 1
            if fault := next((f for f in faults if (f.step, f.attempt) == (step, task.attempt)), None):
                yield broken(gang, fault, step - 1, link.take_rows(taken, gang.saved), position(task, step))
                return
            receipt, stopped = roll(receipt, position(task, step)), gang.stop_requested
            row = a_row(task, step, receipt)
            final = step == task.until or stopped
            row["saves"] = [
                self._save(place, task, step, receipt, [*link.unsaved_rows(), row])
                for place, every in ((snapshots, "snapshot_every"), (store, "every"))
                if place is not None and (final or step % task.job["checkpoint"][every] == 0)
            ]
            link.report(step, row)
            if step == self.kill_controller_at:
                raise ControllerKilled
            if step % self.polls == 0:
                rows = link.take_rows(taken, gang.saved)
                taken += len(rows)
                yield beat(gang, "running", step, rows)
        ended = "steps" if step >= task.job["train"]["steps"] else "stop" if stopped else "until"
        yield beat(
            gang, "done", step, link.take_rows(taken, gang.saved), result={"step": step, "ended": ended}
        )

    def _save(
        self,
        store: Store | SnapshotWriter,
        task: Task,
        step: int,
        receipt: str,
        rows: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Commit unless it is to fail; what became of it, as rows tell."""
        if isinstance(store, SnapshotWriter):
            made = store.save(
                step, 0, number(step), ENTRIES, meta=meta_of(task, step, receipt, rows), complete=step - 1
            )
            return asdict(made)
        if step in self.failing:
            return asdict(CommitOutcome(step, store.location, "failed", 0.0, 0, "OSError: the disk is full"))
        commit(store, task, step, receipt, rows)
        return asdict(CommitOutcome(step, store.location, "published", 0.0, 4))


def writer_of(task: Task) -> SnapshotWriter | None:
    """The writer of snapshots to the task's server, if it has one."""
    if not task.snapshot_servers:
        return None
    place = Placement(task.snapshot_token, "", task.snapshot_servers[0]["address"], task.attempt, task.token)
    return SnapshotWriter(place, 0, 1, [(0, os.memfd_create("note"))])


def restore(store: Store, task: Task) -> tuple[int, str]:
    """Step and receipt of the commit that the controller named. Raises CorruptCommit."""
    if task.restore is None:
        return 0, START
    if addresses := [holder["address"] for holder in task.snapshot_servers]:
        with contextlib.suppress(FileNotFoundError):
            held = PeerMemory(task.snapshot_token, addresses).manifest(task.restore)
            return held.step, held.receipt
    manifest = store.manifest(task.restore)
    if damage := store.verify(task.restore):
        raise CorruptCommit(f"step {task.restore}: {damage[0]}", task.restore)
    return manifest.step, manifest.receipt


ENTRIES = [("model.w", "F32", (1,), (0,), (1,), 0, 4)]
"""Where the only number is in a snapshot."""


def number(step: int) -> memoryview:
    """The bytes of the only tensor: one number, the step."""
    return memoryview(np.full(1, step, np.float32)).cast("B")


def commit(store: Store, task: Task, step: int, receipt: str, rows: list[dict[str, Any]]) -> None:
    """One tensor of one number, the step, with what a manifest carries."""
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), number(step))
    store.publish(step, store.write_raw(step, 0, [piece]), meta_of(task, step, receipt, rows))
    prune(store, Retention(task.job["checkpoint"]["keep"]))


def meta_of(task: Task, step: int, receipt: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a commit says besides its tensors."""
    return {
        "position": position(task, step) + task.job["train"]["global_batch"],
        "receipt": receipt,
        "tokens": tokens(task, step),
        "attempt": task.attempt,
        "layout": task.layout,
        "engine": "torch",
        "seed": task.job["seed"],
        IDENTITY: parse(task.job).identity(),
        "data": task.data,
        "sets": task.sets,
        SHARDS: task.shards,
        "rows": rows,
        "skips": list(task.skips),
    }


def position(task: Task, step: int) -> int:
    """Where the samples of a step begin, with the windows that the task leaves out."""
    return start_of(0, step - 1, task.job["train"]["global_batch"], merged(task.skips))


def a_row(task: Task, step: int, receipt: str) -> dict[str, Any]:
    """The row of a step: the same numbers in every attempt, but for the clock."""
    return {
        "step": step,
        "loss": 6.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": tokens(task, step),
        "tokens_per_second": 1000.0,
        "step_seconds": STEP_SECONDS,
        "data_seconds": 0.0,
        "commit_seconds": 0.0,
        "samples": receipt,
        "layout": str(Layout.from_json(task.layout)),
        "attempt": task.attempt,
        "memory_bytes": 1,
        "time": wall(),
    }


def tokens(task: Task, step: int) -> int:
    """Tokens that so many steps have used."""
    return int(step * task.job["train"]["global_batch"] * task.job["data"]["sequence_length"])


def beat(
    gang: Attempt, state: RankState, step: int = -1, rows: tuple[Any, ...] = (), **more: Any
) -> GangStatus:
    """All ranks in one state."""
    return GangStatus(tuple(status(rank, state, step, **more) for rank in range(gang.world)), rows)


def broken(gang: Attempt, fault: FaultSpec, step: int, rows: tuple[Any, ...], start: int = 0) -> GangStatus:
    """All ranks run but the one that the fault befalls; NaN is seen by all."""
    if fault.kind == "nan":
        error = NonFinite("loss is nan", fault.step, start)
        return beat(
            gang,
            "failed",
            step,
            rows,
            error=describe(error),
            cause=cause_of(error),
            failed_at=time.monotonic(),
        )
    ranks = [status(rank, "running", step) for rank in range(gang.world)]
    if fault.kind == "kill":
        ranks[fault.rank] = status(
            fault.rank, "dead", step, error="killed", cause=Cause("exited", -9), failed_at=time.monotonic()
        )
    elif fault.kind == "raise":
        error = f"InjectedFault: injected at rank {fault.rank}, step {fault.step}"
        ranks[fault.rank] = status(
            fault.rank, "failed", step, error=error, cause=RAISED, failed_at=time.monotonic()
        )
    else:
        ranks[fault.rank] = status(fault.rank, "running", step, last_heartbeat=time.monotonic() - 3600)
    return GangStatus(tuple(ranks), rows)


def status(rank: int, state: RankState, step: int, **more: Any) -> RankStatus:
    """A rank, heard just now."""
    return RankStatus(
        rank, "node-0", 1000 + rank, state, step, **{"last_heartbeat": time.monotonic(), **more}
    )


@dataclass
class RemoteTask:
    """A function that runs in this process after `looks` looks at it."""

    call: Callable[[], Any]
    looks: int = 0
    cancelled: bool = False

    def done(self) -> bool:
        """Whether it has been looked at often enough."""
        self.looks -= 1
        return self.looks < 0

    def result(self) -> Any:
        """What the function returns."""
        return self.call()

    def cancel(self) -> None:
        """Never call it."""
        self.cancelled = True


class SnapshotServers:
    """The service that keeps snapshots, on the only node there is."""

    def __init__(self, target: str, token: str) -> None:
        self.target, self._token = target, token
        self.running: list[SnapshotServer] = []

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        """Where it is, started if it is not running."""
        if min_nodes > 1:
            return []
        if not self.running:
            self.running.append(SnapshotServer(self._token))
        return [{"node": "node-0", "address": holder.address} for holder in self.running]

    def leave(self, addresses: Set[str]) -> None:
        """See `NodeServices.leave`."""

    def stop(self) -> None:
        """End it."""
        while self.running:
            self.running.pop().close()


def fake_cluster(
    gang: Callable[[], FakeGang],
    run_task: Callable[..., RemoteTask] = lambda function, *arguments, **keywords: RemoteTask(
        lambda: function(*arguments, **keywords)
    ),
    services: Callable[[str, str], SnapshotServers] = SnapshotServers,
) -> Cluster:
    """A cluster whose gangs are fakes."""
    return Cluster(
        gang=gang,
        offer=lambda bundle, most: Offer(8e9),
        run_task=run_task,
        services=services,
    )


def drive(spec: JobSpec, uri: str, until: int | None = None) -> dict[str, Any]:
    """A whole run of the script in the directory at `uri`; its data must be prepared. Returns the summary."""
    run = RunDir(uri)
    run.create()
    cluster = fake_cluster(lambda: FakeGang(Training(), capacity=lambda: spec.resources.workers.max))
    return Controller(spec, run, until, cluster).drive()

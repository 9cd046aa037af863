"""A rank's commits: when they are due, what goes into them, and their outcomes.

A step is blocked only for a copy to host memory; another process writes that copy. If the task has snapshot servers,
snapshots also go into the memory of other nodes, as often as the job asks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.averaged import weights_of
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.commit_writer import CommitOutcome
from orchestrator.checkpoint.evaluations import MEASURED, TO_EVALUATE, measure_of
from orchestrator.checkpoint.identity import (
    BASE,
    CLEANED_BY,
    CODE,
    CONTINUED,
    IDENTITY,
    KEPT,
    SHARDS,
    TEACHER,
    TILES,
)
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit
from orchestrator.checkpoint.reader import Reader
from orchestrator.checkpoint.retention import retention_of
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.snapshot_writer import Placement
from orchestrator.checkpoint.snapshots import LOCATION, PeerMemory
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import Agreed, agree, gather_json
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.retry import patient
from orchestrator.storage.run_directory import Row
from orchestrator.train.committed_state import CHUNKS_HEAD
from orchestrator.train.engines.engine import Engine
from orchestrator.train.task import Task

FINISH_TIMEOUT = 300.0
"""Seconds to wait for the last commit of a task."""
SNAPSHOT_SHARE = 0.03
"""Share of a rank's time that snapshots may cost with `snapshot_every: auto`."""
MOST_HELD = 2
"""Maximum number of rows that wait for a snapshot."""
RETRY_EVERY = 2.0
"""Seconds between tries of the last commit."""
MAX_SKIPPED = 8
"""Maximum number of commits that are skipped after failures, before storage is tried again."""
CARRIED = ("last_evaluation_step", "evaluation", "best", "stale", "best_of", CHUNKS_HEAD, CONTINUED)
"""Fields of a run's progress that a commit stores in its meta under the same names."""


class Commits:
    """Saves the engine's state after steps; a context manager that leaves no process behind."""

    def __init__(
        self, task: Task, spec: JobSpec, layout: Layout, context: WorkerContext, engine: Engine
    ) -> None:
        self._task = task
        self._spec = spec
        self._layout = layout
        self._context = context
        self._engine = engine
        self._store = Store(f"{task.run}/{COMMITS}", attempt=task.token)
        self._placement = placement_of(task, context) if task.snapshot_servers else None
        self._saver: Saver | None = None
        self._saved = task.restore or 0
        self._skip = 0
        self._outcomes: list[CommitOutcome] = []
        self._snapshot_taken = 0.0  # monotonic seconds
        self._cost = 0.0  # seconds of the last snapshot
        self._last_snapshot = -1  # its step
        self._complete = -1  # step of the last snapshot that all ranks have made
        self._identity = spec.identity()
        self._losses: list[float] = []  # of the steps since the last save to the store
        self._latest = (-1, "")  # step of the last save that ended, and why it failed
        self.failures = 0

    def open(self, step: int) -> tuple[CommitManifest, Reader]:
        """Open the commit of a step: from the memory of other nodes if it is complete there, else from the store.

        In a task that only evaluates, the reader returns the weights that the job evaluates.

        Raises:
            CorruptCommit: if the commit existed only in the memory of nodes, and they do not return it.
        """
        peers = self._peers()
        if peers is not None:
            with contextlib.suppress(OSError):  # lost nodes: the store has the commit too
                snapshot = peers.manifest(step)
                return snapshot, peers.reader(snapshot)
        patience = patient(self._spec.limits.unsaved, self._context.stop_requested)
        store = Store(self._store.uri, retry=patience)
        try:
            manifest = store.manifest(step)
        except InputError:
            if peers is None or step in store.steps():
                raise
            what = f"step {step} was in the memory of nodes alone, which do not give it"
            raise CorruptCommit(what, step) from None
        raw = not self._task.evaluate_only
        return manifest, weights_of(store, manifest, self._spec.checkpoint, raw)

    def _peers(self) -> PeerMemory | None:
        """Return the memory of nodes, this node's first; None without."""
        if not self._task.snapshot_servers:
            return None
        node = self._context.rank_info.node
        nearest = sorted(self._task.snapshot_servers, key=lambda server: server["node"] != node)
        return PeerMemory(self._task.snapshot_token, [server["address"] for server in nearest])

    def __enter__(self) -> Commits:
        if self._task.commit:
            self._saver = self._open_saver()
            if self._spec.resources.per_worker.gpu:
                self._saver.prepare(self._engine.state())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._saver is not None and kind is None:
            self._saver.close(FINISH_TIMEOUT)
        elif self._saver is not None:
            self._saver.abandon()
        self._saver = None

    @property
    def failed_step(self) -> int:
        """See `Saver.failed_step`."""
        return -1 if self._saver is None else self._saver.failed_step

    @property
    def held(self) -> int:
        """See `Saver.held`."""
        self._receive()
        return -1 if self._saver is None else self._saver.held

    @property
    def ready(self) -> bool:
        """Whether a snapshot now would wait for nothing, and keep within SNAPSHOT_SHARE of this rank's time."""
        self._receive()
        is_free = self._saver is None or (self._saver.has_room and not self._saver.is_snapping)
        return is_free and time.monotonic() - self._snapshot_taken >= self._cost / SNAPSHOT_SHARE

    def rows_to_hold(self, step: int) -> int:
        """Return how many of the last rows do not count yet: those of steps whose snapshot is under way.

        One snapshot is under way at a time, so that two steps are after the last whole one, unless snapshots fail.
        """
        is_under_way = self._last_snapshot > self._complete
        return min(step - self._complete, MOST_HELD) if is_under_way else 0

    def note_agreed(self, agreed: Agreed) -> None:
        """Note which snapshot all ranks have made. The rows up to its step count from now on."""
        if agreed.held > self._complete:
            self._complete = agreed.held
            self._context.release(self._complete)

    def before_training(self, progress: dict[str, Any]) -> None:
        """Save the initial state if a separate task evaluates it and it is not saved yet."""
        if self._saver is not None and self._task.restore is None and self._is_evaluated(progress):
            self._save(progress, None, durable=True)

    def after_step(
        self,
        progress: dict[str, Any],
        row: Row | None,
        agreed: Agreed,
        final: bool,
        may_save: bool = True,
    ) -> float:
        """Save if a save is due, and if this step `may_save`. Return the seconds for which the step was blocked."""
        checkpoint = self._spec.checkpoint
        step = progress["step"]
        if self._saver is not None:
            self._saver.tell_failed(agreed.failed_steps)
        self._losses += [row["loss"]] if row and row["loss"] is not None else []
        durable = (
            final
            or step == self._spec.train.decay_from
            or step in self._spec.train.thaw
            or self._is_evaluated(progress)
            or (step % checkpoint.every == 0 and not self._backs_off(agreed.failures))
        )
        every = checkpoint.snapshot_every
        snapshot = self._placement is not None and (
            agreed.ready if every == "auto" else every is not None and step % every == 0
        )
        if self._saver is None or not may_save or not (durable or snapshot):
            return 0.0
        return self._save(progress, row, durable, snapshot=snapshot or every != "auto")

    def _is_evaluated(self, progress: Mapping[str, Any]) -> bool:
        """Whether a separate task evaluates the commit of this state."""
        step = progress["step"]
        return progress["last_evaluation_step"] != step and self._spec.is_due_beside(step)

    def outcomes(self) -> list[dict[str, Any]]:
        """Return the outcomes of the saves to the store that ended since the last call, as JSON."""
        self._receive()
        ended, self._outcomes = self._outcomes, []
        return [asdict(outcome) for outcome in ended]

    def go_on(self, engine: Engine) -> None:
        """Save the state of another engine from now on. Call `finish` first."""
        self._engine = engine
        self.__enter__()

    def finish(self, progress: dict[str, Any]) -> None:
        """Commit this state, and retry until the commit succeeds or storage has failed for too long.

        Raises:
            OSError: if the commit failed, with the reason.
        """
        if self._saver is None:
            return
        step = progress["step"]
        restored = self._task.restore
        rank = self._context.rank_info.rank
        patience = min(FINISH_TIMEOUT, self._spec.limits.unsaved)
        end = time.monotonic() + patience
        late = False
        failures = 1
        tries = 0
        while failures and not late:
            if self._saved != step:
                self._save(progress, None, durable=True)
            self._context.set_waiting(True)
            saver = self._saver
            assert saver is not None
            if rank > 0:  # rank 0 hears from the others before it waits for their notes
                self._record_outcomes(saver.close(FINISH_TIMEOUT))
            told = gather_json([saver.failed_step, self._latest[1]])
            saver.tell_failed([failed_step for failed_step, _ in told])
            if rank == 0:
                self._record_outcomes(saver.close(FINISH_TIMEOUT))
            self._saver = None
            # Rank 0 publishes, so its outcome is that of the commit; other writers may fail as a consequence.
            failed = rank == 0 and step != restored and self._latest != (step, "")
            agreed = agree(0, time.monotonic() > end, int(failed))
            late, failures = agreed.stop, agreed.failures
            if failures and not late:
                time.sleep(RETRY_EVERY)
                tries += 1
                # Every try has its own attempt name, so that a late note of an earlier try is not mistaken for its own.
                self._store = Store(self._store.uri, attempt=f"{tries}{self._task.token}")
                self._saved, self._saver = -1, self._open_saver()
        self._context.set_waiting(False)
        if failed:
            own = self._latest[1] or f"it was not written within {FINISH_TIMEOUT:.0f} s"
            reason = "; ".join(dict.fromkeys([own, *(why for _, why in told[1:] if why)]))
            raise OSError(f"the commit at step {step} failed: {reason}")

    def _open_saver(self) -> Saver:
        rank_info, retention = (
            self._context.rank_info,
            retention_of(self._spec.checkpoint, self._spec.train.decay_from, self._spec.evaluates_beside),
        )
        return Saver(
            self._store,
            rank_info.rank,
            rank_info.world_size,
            placement=self._placement,
            retention=retention,
        )

    def _save(self, progress: dict[str, Any], row: Row | None, durable: bool, snapshot: bool = True) -> float:
        assert self._saver is not None
        self._context.set_waiting(True)
        self._saver.wait_until_prepared()
        began = time.perf_counter()
        # Only writer 0's meta is used.
        meta = {} if self._context.rank_info.rank else self._meta(progress, row)
        self._saver.save(
            progress["step"], self._engine.state(), meta, durable, snapshot, complete=self._complete
        )
        self._context.set_waiting(False)
        if durable:
            self._saved, self._losses = progress["step"], []
        took = time.perf_counter() - began
        if snapshot:
            self._snapshot_taken, self._cost = time.monotonic(), took
            self._last_snapshot = progress["step"] if self._placement else -1
        return took

    def _meta(self, progress: dict[str, Any], row: Row | None) -> dict[str, Any]:
        """Return what a commit of this state says besides its tensors."""
        return {
            "position": progress["position"],
            "receipt": progress["receipt"],
            "tokens": progress["tokens"],
            "losses": progress["losses"],
            "skips": progress["skips"],
            **{key: progress[key] for key in CARRIED},
            TO_EVALUATE: self._is_evaluated(progress),
            MEASURED: measure_of(self._spec.evaluate, self._spec.checkpoint.averaged),
            "attempt": self._task.attempt,
            "layout": self._layout.to_json(),
            "engine": self._layout.engine,
            "seed": self._spec.seed,
            IDENTITY: self._identity,
            "data": self._task.data,
            "sets": self._task.sets,
            SHARDS: self._task.shards,
            BASE: self._task.base,
            KEPT: self._task.folder_config,
            CODE: self._task.code,
            CLEANED_BY: self._task.cleaned_by,
            TILES: True,
            **({TEACHER: self._task.teacher} if self._task.teacher else {}),
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            # Rows that are not stored yet, so that none is lost if the run is killed right after this commit.
            "rows": [*self._context.unsaved_rows(), *([row] if row else [])],
        }

    def _backs_off(self, failures: int) -> bool:
        """Whether to skip a commit. Each further failure in a row doubles the interval, up to MAX_SKIPPED."""
        if not failures:
            self._skip = 0
            return False
        self._skip += 1
        return self._skip % min(2**failures, MAX_SKIPPED) != 0

    def _receive(self) -> None:
        if self._saver is not None:
            self._record_outcomes(self._saver.poll())

    def _record_outcomes(self, outcomes: list[CommitOutcome]) -> None:
        for outcome in outcomes:
            if outcome.place == LOCATION:
                if not self._spec.resources.per_worker.gpu:
                    # On CPUs the writing process competes with training, and so does the server that receives.
                    self._cost += 2 * outcome.seconds
            else:
                failed = outcome.state == "failed"
                self.failures = self.failures + 1 if failed else 0
                self._latest = (outcome.step, outcome.reason or "no reason given" if failed else "")
                self._outcomes.append(outcome)


def placement_of(task: Task, context: WorkerContext) -> Placement:
    """Return where a rank's part of each snapshot is held: on its own node, and as a copy on another one.

    Without another node, this node's server is the only one.
    """
    info = context.rank_info
    own = [server["address"] for server in task.snapshot_servers if server["node"] == info.node]
    others = [server["address"] for server in task.snapshot_servers if server["node"] != info.node]
    return Placement(
        token=task.snapshot_token,
        own=own[0] if own else "",
        other=others[info.rank % len(others)] if others else "",
        attempt=task.attempt,
        group=task.token,
    )

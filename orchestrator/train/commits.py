"""A rank's commits: when they are due, what goes into them, and their outcomes.

The state is copied to host memory while the next step's forward and backward pass run; the update waits for the copy,
and another process writes it. If the task has snapshot servers, snapshots also go into the memory of other nodes, as
often as the job asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.committer import CommitOutcome
from orchestrator.checkpoint.config import SNAPSHOT_SHARE, CheckpointSpec
from orchestrator.checkpoint.peer_memory import LOCATION
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.retention import retention_of
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.snapshot_writer import Placement
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import Agreed, agree, gather_json
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.row_line import Row
from orchestrator.train.commit_meta import meta_of
from orchestrator.train.config import TrainSpec
from orchestrator.train.engines.engine import Engine
from orchestrator.train.task import Task

FINISH_TIMEOUT = 300.0
"""Seconds to wait for the last commit of a task."""
MAX_HELD_ROWS = 2
"""Maximum number of rows that wait for a snapshot."""
RETRY_EVERY = 2.0
"""Seconds between tries of the last commit."""
MAX_SKIPPED = 8
"""Maximum number of commits that are skipped after failures, before storage is tried again."""


class Commits:
    """Saves the engine's state after steps; a context manager that leaves no process behind."""

    def __init__(
        self,
        task: Task,
        layout: Layout,
        context: WorkerContext,
        engine: Engine,
        placement: Placement | None,
        *,
        identity: Mapping[str, Any],
        checkpoint: CheckpointSpec,
        train: TrainSpec,
        evaluate: EvaluateSpec | None,
        measured: Mapping[str, Any],
        unsaved: float,
        gpus: float,
        extra_pieces: Callable[[], list[TensorPiece]] | None = None,
        reserved_pieces: Callable[[], list[TensorPiece]] | None = None,
    ) -> None:
        """Make ready to save.

        Args:
            task: what this gang does, and from which commit.
            layout: how the ranks divide the work.
            context: this rank's number and its connection to the controller.
            engine: has the state.
            placement: where snapshots are held in the memory of nodes; None without snapshots.
            identity: what makes two runs the same run, see `JobSpec.identity`.
            checkpoint: when to save, and what is kept.
            train: the steps after which a commit is needed whatever `checkpoint` says.
            evaluate: which commits are evaluated beside the run; None without evaluations.
            measured: the settings that change the values of evaluations, see `measure_of`.
            unsaved: seconds for which storage may fail.
            gpus: GPUs of a worker; 0 on CPUs.
            extra_pieces: returns what is saved besides the engine's state; None for nothing.
            reserved_pieces: returns tensors of the sizes that `extra_pieces` returns in later steps; None for nothing.
        """
        self._task = task
        self._identity = identity
        self._checkpoint = checkpoint
        self._train = train
        self._evaluate = evaluate
        self._measured = measured
        self._unsaved = unsaved
        self._gpus = gpus
        self._extra_pieces = extra_pieces or list
        self._reserved_pieces = reserved_pieces or list
        self._layout = layout
        self._context = context
        self._engine = engine
        self._store = Store(f"{task.run}/{COMMITS}", attempt=task.token)
        self._placement = placement
        self._saver: Saver | None = None
        self._saved = task.restore or 0
        self._skip = 0
        self._outcomes: list[CommitOutcome] = []
        self._snapshot_taken = 0.0  # monotonic seconds
        self._cost = 0.0  # seconds of the last snapshot
        self._copies_snapshot = False  # whether the copy under way is a snapshot
        self._last_snapshot = -1  # its step
        self._complete = -1  # step of the last snapshot that all ranks have made
        self._losses: list[float] = []  # of the steps since the last save to the store
        self._latest = (-1, "")  # step of the last save that ended, and why it failed
        self.failures = 0

    def __enter__(self) -> Commits:
        if self._task.commit:
            self._saver = self._open_saver()
            self._engine.before_change = self._finish_copy
            if self._gpus:
                self._saver.prepare([*self._engine.state(), *self._reserved_pieces()])
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._saver is not None and error_type is None:
            self._saver.close(FINISH_TIMEOUT)
        elif self._saver is not None:
            self._saver.abandon()
        self._saver = None

    @property
    def failed_step(self) -> int:
        """See `Saver.failed_step`."""
        return -1 if self._saver is None else self._saver.failed_step

    @property
    def snapshot_step(self) -> int:
        """See `Saver.snapshot_step`. As of the last `receive`."""
        return -1 if self._saver is None else self._saver.snapshot_step

    @property
    def ready(self) -> bool:
        """Whether a snapshot now would wait for nothing, and keep within SNAPSHOT_SHARE of this rank's time. As of the
        last `receive`."""
        is_free = self._saver is None or (self._saver.has_room and not self._saver.is_snapping)
        return is_free and time.monotonic() - self._snapshot_taken >= self._cost / SNAPSHOT_SHARE

    def rows_to_hold(self, step: int) -> int:
        """Return how many of the last rows do not count yet: those of steps whose snapshot is under way.

        One snapshot is under way at a time, so that two steps are after the last whole one, unless snapshots fail.
        """
        is_under_way = self._last_snapshot > self._complete
        return min(step - self._complete, MAX_HELD_ROWS) if is_under_way else 0

    def note_agreed(self, agreed: Agreed) -> None:
        """Note which snapshot all ranks have made. The rows up to its step count from now on."""
        if agreed.snapshot_step > self._complete:
            self._complete = agreed.snapshot_step
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
        """Save if a save is due.

        Args:
            progress: the progress after the step, as plain data.
            row: the step's row; None on ranks without one.
            agreed: what all ranks know of each other after the step. Saves depend on it only, so that all ranks
                make the same.
            final: whether the task ends with this step.
            may_save: False within a rollout, whose answers no commit has.

        Returns:
            The seconds for which the step was blocked.
        """
        checkpoint = self._checkpoint
        step = progress["step"]
        if self._saver is not None:
            self._saver.tell_failed(agreed.failed_steps)
        self._losses += [row["loss"]] if row and row["loss"] is not None else []
        durable = (
            final
            or step == self._train.decay_from
            or step in self._train.thaw
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
        evaluate = self._evaluate
        is_due = evaluate is not None and evaluate.is_due_beside(step, self._train.steps)
        return is_due and progress["last_evaluation_step"] != step

    def outcomes(self) -> list[dict[str, Any]]:
        """Return the outcomes of the saves to the store that ended since the last call, as JSON."""
        self.receive()
        finished, self._outcomes = self._outcomes, []
        return [asdict(outcome) for outcome in finished]

    def continue_with(self, engine: Engine) -> None:
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
        patience = min(FINISH_TIMEOUT, self._unsaved)
        deadline = time.monotonic() + patience
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
            outcomes = gather_json([saver.failed_step, self._latest[1]])
            saver.tell_failed([failed_step for failed_step, _ in outcomes])
            if rank == 0:
                self._record_outcomes(saver.close(FINISH_TIMEOUT))
            self._saver = None
            # Rank 0 publishes, so its outcome is that of the commit; other writers may fail as a consequence.
            failed = rank == 0 and step != restored and self._latest != (step, "")
            agreed = agree(0, time.monotonic() > deadline, int(failed))
            late, failures = agreed.stop, agreed.failures
            if failures and not late:
                if rank == 0:
                    self._report_try(step, tries, round(patience / RETRY_EVERY))
                time.sleep(RETRY_EVERY)
                tries += 1
                # Every try has its own attempt name, so that a late note of an earlier try is not mistaken for its own.
                self._store = Store(self._store.uri, attempt=f"{tries}{self._task.token}")
                self._saved, self._saver = -1, self._open_saver()
        self._context.set_waiting(False)
        self._context.end_work()
        if failed:
            own_reason = self._latest[1] or f"it was not written within {FINISH_TIMEOUT:.0f} s"
            reason = "; ".join(
                dict.fromkeys(
                    [own_reason, *(other_reason for _, other_reason in outcomes[1:] if other_reason)]
                )
            )
            raise OSError(f"the commit at step {step} failed: {reason}")
        if not failures:  # the commit has the steps whose rows wait for a snapshot
            self._complete = max(self._complete, step)
            self._context.release(step)

    def _report_try(self, step: int, tries: int, most: int) -> None:
        """Report that the last commit failed and is tried again, so that a stop does not seem stuck."""
        if tries == 0:
            reason = self._latest[1] or "it took too long"
            self._context.begin_work(
                f"the save at step {step} failed ({reason}) and is tried again", "tries", most
            )
        else:
            self._context.progressed()

    def _open_saver(self) -> Saver:
        rank_info = self._context.rank_info
        is_beside = self._evaluate is not None and self._evaluate.is_beside
        retention = retention_of(self._checkpoint, self._train.decay_from, is_beside)
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
        start = time.perf_counter()
        # Only writer 0's meta is used.
        meta = {} if self._context.rank_info.rank else self._meta(progress, row)
        self._saver.save(
            progress["step"],
            [*self._engine.state(), *self._extra_pieces()],
            meta,
            durable,
            snapshot=snapshot,
            complete=self._complete,
            overlap=True,
        )
        self._context.set_waiting(False)
        if durable:
            self._saved, self._losses = progress["step"], []
        seconds = time.perf_counter() - start
        self._copies_snapshot = snapshot
        if snapshot:
            self._snapshot_taken, self._cost = time.monotonic(), seconds
            self._last_snapshot = progress["step"] if self._placement else -1
        return seconds

    def _finish_copy(self) -> None:
        """Wait for the copy of the last save, because the state is about to change."""
        if self._saver is not None:
            began = time.perf_counter()
            copying = self._saver.finish_copy()
            waited = time.perf_counter() - began
            if self._copies_snapshot:
                # On CPUs all of the copy competes with training; from a GPU it costs what the update waits for it.
                self._cost += waited if self._gpus else copying
            self._copies_snapshot = False

    def _meta(self, progress: dict[str, Any], row: Row | None) -> dict[str, Any]:
        """Return what a commit of this state says besides its tensors."""
        return meta_of(
            progress,
            self._task,
            self._layout,
            identity=self._identity,
            is_evaluated=self._is_evaluated(progress),
            measured=self._measured,
            losses=self._losses,
            rows=[*self._context.unsaved_rows(), *([row] if row else [])],
        )

    def _backs_off(self, failures: int) -> bool:
        """Whether to skip a commit. Each further failure in a row doubles the interval, up to MAX_SKIPPED."""
        if not failures:
            self._skip = 0
            return False
        # All ranks count the same failures, see `agree`, and so skip the same commits.
        self._skip += 1
        return self._skip % min(2**failures, MAX_SKIPPED) != 0

    def receive(self) -> None:
        """Take the outcomes that the writing process has reported, without waiting."""
        if self._saver is not None:
            self._record_outcomes(self._saver.poll())

    def _record_outcomes(self, outcomes: list[CommitOutcome]) -> None:
        for outcome in outcomes:
            if outcome.place == LOCATION:
                if not self._gpus:
                    # On CPUs the writing process competes with training, and so does the server that receives.
                    self._cost += 2 * outcome.seconds
            else:
                failed = outcome.state == "failed"
                self.failures = self.failures + 1 if failed else 0
                self._latest = (outcome.step, outcome.reason or "no reason given" if failed else "")
                self._outcomes.append(outcome)

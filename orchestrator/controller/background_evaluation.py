"""Evaluations of commits on a worker of their own, one at a time and in order, while the run trains on.

`decide` says which is evaluated when. What waits follows from the commits and the rows of evals.jsonl alone, so that a
controller that dies loses nothing: the next finds the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from cluster.workers.cluster import Cluster
from cluster.workers.fork_server import START_TIMEOUT
from cluster.workers.gang import FINISHED, Gang, GangStatus, RankStatus
from orchestrator.checkpoint.evaluations import attach, awaits, is_of
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.retention import prune, retention_of
from orchestrator.config.spec import JobSpec
from orchestrator.controller.decide import BEGINS
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import Phase, State
from orchestrator.observe.rank_log import output_of_evaluation
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY, EVALUATION_PATIENCE, Task

SILENCE = 60.0
"""Seconds without a heartbeat after which the process counts as dead."""
PLACEMENT = START_TIMEOUT + 60.0
"""Seconds for a worker to be placed and to have all imports done."""


@dataclass(frozen=True)
class WaitingCommit:
    """A commit that is to be evaluated: its step, its attempt, and the micro-batch of its layout."""

    step: int
    attempt: int
    micro_batch: int


class EvaluationBeside:
    """The commits that wait to be evaluated, and the process that evaluates the first of them.

    `failed` says why the last try has just failed, empty otherwise.
    """

    def __init__(self, cluster: Cluster, spec: JobSpec, run: RunDir, faults: tuple[str, ...] = ()) -> None:
        """`faults` are injected, for tests."""
        self._cluster, self._spec, self._run, self._faults = cluster, spec, run, faults
        self._bundle = spec.resources.per_worker.bundle
        # Never changed in place: what asks for the status reads it from another thread.
        self._waiting: dict[int, WaitingCommit] = {}
        self._gang: Gang | None = None
        self._step: int | None = None  # that is evaluated by a process
        self._batches, self._moved = 0, 0.0
        self._waits = ""
        self._told: list[str] = []
        self._tried: set[int] = set()
        self._failure = self.failed = ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The steps of the commits that wait, that which is evaluated included, in order."""
        return tuple(self._waiting)

    @property
    def text(self) -> str:
        """What is evaluated and what waits, in a line; empty if nothing does."""
        waiting = self.waiting
        if not waiting:
            return ""
        first, *others = waiting
        how = "waits to be evaluated" if self._gang is None else "is about to be evaluated"
        if self._step == first:
            how = f"is evaluated, {self._batches} batches so far"
        return f"step {first} {how}" + (f"; {len(others)} more wait" if others else "")

    def news(self, phase: Phase) -> list[str]:
        """A line for each thing that happened since the last call and that a user should know; none in phases of which
        a further event would tell that they begin."""
        if phase not in BEGINS:
            return []
        told, self._told = self._told, []
        return told

    def held(self) -> int:
        """How many workers it occupies."""
        return self._gang.held() if self._gang is not None else 0

    def find(self, history: RunHistory) -> None:
        """Find the commits that wait; what is evaluated goes on if it is one of them.

        A commit that does not have the row which evals.jsonl has of it is given that.
        """
        if not self._spec.evaluates_beside:
            return
        store, found = history.store, dict[int, WaitingCommit]()
        known = {row["step"]: row for row in history.evaluations.rows.newest()}
        for step in store.steps():
            try:
                commit = store.manifest(step)
            except CorruptCommit:
                continue
            if not awaits(store, commit):
                continue
            if (row := known.get(step)) is not None and is_of(row, commit):
                attach(store, row)
                continue
            layout = Layout.from_json(commit.meta["layout"])
            found[step] = WaitingCommit(step, commit.meta["attempt"], layout.micro_batch)
        if self._step is not None and found.get(self._step) != self._waiting.get(self._step):
            self.stop()
        self._waiting = found

    def settle(self, history: RunHistory) -> None:
        """Have all results stored, so that it is known what waits and which commit is the best, and remove what is not
        kept; called while no ranks run."""
        history.settle()
        self.find(history)
        prune(history.store, retention_of(self._spec))

    def published(self, step: int, state: State) -> None:
        """Hear of a commit of the attempt in `state`; it waits from now on if the job asks for its evaluation."""
        if self._spec.is_due_beside(step) and step not in self._waiting:
            assert state.layout is not None
            commit = WaitingCommit(step, state.attempt, state.layout.micro_batch)
            self._waiting = {**self._waiting, step: commit}

    def follow(
        self,
        state: State,
        data: PreparedData,
        shards: str,
        base: dict[str, Any] | None = None,
        folder_config: dict[str, Any] | None = None,
    ) -> None:
        """Evaluate the commit that `state` says and no other, or nothing, on the held-out text in `data`, whose digest
        is `shards`; `base` are the weights that the run began with, and `folder_config` what it has kept of a folder's
        configuration.

        Returns at once: a worker is placed, and the process started in it, in later calls.
        """
        if state.evaluation_waits and not self._waits:
            self._told.append(f"{self.text}: there is no {state.evaluation_waits}")
        step, self._waits = state.evaluating, state.evaluation_waits
        if step is None or (self._step is not None and self._step != step):
            self.stop()
        if step is None or self._step is not None or step not in self._waiting:
            return
        if self._gang is None:
            self._gang, self._moved = self._cluster.gang(), time.monotonic()
            self._gang.prewarm(1, self._bundle, ENTRY)
        self._gang.poll(0)
        if self._gang.ready():
            try:
                task = self._task(self._waiting[step], data, shards, base, folder_config)
                output = output_of_evaluation(self._run.uri, step)
                self._gang.start(1, self._bundle, ENTRY, task.to_json(), output=output)
            except TimeoutError as error:
                self._fail(step, str(error))
                return
            self._step, self._batches, self._moved = step, 0, time.monotonic()
        elif time.monotonic() - self._moved > PLACEMENT:
            self._fail(step, f"no worker was ready for it within {PLACEMENT:.0f} s")

    def look(self, history: RunHistory) -> None:
        """See how the evaluation goes; the row of one that has ended is added to the history."""
        if self._gang is not None and self._step is not None:
            self._look(history, self._gang.poll(0), self._step)
        self.failed, self._failure = self._failure, ""

    def _look(self, history: RunHistory, status: GangStatus, step: int) -> None:
        rank = status.ranks[0]
        if rank.evaluated_batches != self._batches:
            self._batches, self._moved = rank.evaluated_batches, time.monotonic()
        if rank.state == "done":
            self._step = None
            self._forget(step)
            history.evaluated(rank.result["evaluation"])
        elif why := self._wrong(rank, status.at):
            if rank.cause.kind == "corrupt_commit":  # it has no result: nothing is gained by another try
                self._forget(step)
            self._fail(step, why)

    def _forget(self, step: int) -> None:
        self._waiting = {other: commit for other, commit in self._waiting.items() if other != step}

    def stop(self) -> None:
        """End what is evaluated, and give back the worker."""
        self._step = None
        if self._gang is not None:
            self._gang.close()
            self._gang = None

    def _task(
        self,
        commit: WaitingCommit,
        data: PreparedData,
        shards: str,
        base: dict[str, Any] | None,
        folder_config: dict[str, Any] | None,
    ) -> Task:
        """The task of one process, which writes nothing."""
        faults = (
            () if commit.step in self._tried else self._faults
        )  # in the first try, as in the first attempt
        self._tried.add(commit.step)
        return Task.of_evaluation(
            self._spec,
            commit.micro_batch,
            run=self._run.uri,
            data=data.uri,
            restore=commit.step,
            attempt=commit.attempt,
            faults=faults,
            shards=shards,
            sets=data.sets,
            base=base,
            folder_config=folder_config,
        )

    def _wrong(self, rank: RankStatus, at: float) -> str:
        """Why the process gives no result, as seen at that time; empty if it may yet."""
        if rank.state in FINISHED:
            return rank.error or "its process ended"
        if at - rank.last_heartbeat > SILENCE:
            return f"no sign of life for {SILENCE:.0f} s"
        still = at - self._moved > EVALUATION_PATIENCE
        return f"no progress for {EVALUATION_PATIENCE:.0f} s" if still else ""

    def _fail(self, step: int, why: str) -> None:
        self._failure = why if step in self._waiting else ""
        again = "" if step in self._waiting else "; it stays without one"
        self._told.append(f"the evaluation of step {step} failed: {why}{again}")
        self.stop()

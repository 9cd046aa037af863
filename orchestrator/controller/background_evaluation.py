"""Evaluate commits on a separate worker, one at a time and in order, while the run trains on.

`decide` says which commit is evaluated when. The waiting commits follow from the store and evals.jsonl alone, so the
next controller finds the same ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from cluster.workers.cluster import Cluster
from cluster.workers.fork_server import START_TIMEOUT
from cluster.workers.gang import FINISHED, Bundle, Gang, GangStatus, RankStatus
from cluster.workers.worker_context import Work
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.evaluations import attach, awaits, is_of
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.retention import prune, retention_of
from orchestrator.controller.news import News
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import State
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.observe.formatting import work_text
from orchestrator.observe.rank_log import output_of_evaluation
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY, EVALUATION_PATIENCE, Task

SILENCE = 60.0
"""Seconds without a heartbeat after which the process counts as dead."""
PLACEMENT = START_TIMEOUT + 60.0
"""Seconds for a worker to be placed and to finish its imports."""


@dataclass(frozen=True)
class WaitingCommit:
    """A commit that waits to be evaluated: its step, its attempt, and the micro-batch of its layout."""

    step: int
    attempt: int
    micro_batch: int


class BackgroundEvaluation:
    """The commits that wait to be evaluated, and the process that evaluates the first of them.

    Attributes:
        failed: why the evaluation has just failed, as of the last `look`; empty if it has not.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: RunDir,
        job: dict[str, Any],
        bundle: Bundle,
        evaluate: EvaluateSpec | None,
        steps: int,
        checkpoint: CheckpointSpec,
        decay_from: int | None,
        faults: tuple[str, ...] = (),
    ) -> None:
        """Evaluate nothing yet.

        Args:
            cluster: where to run.
            run: the run directory.
            job: the job as JSON, which the evaluating process reads.
            bundle: what the process occupies.
            evaluate: which commits are evaluated; None without evaluations.
            steps: steps of the run.
            checkpoint: which commits are kept.
            decay_from: the step at which the learning rate begins to decay; None if none does.
            faults: faults to inject, for tests.
        """
        self._cluster = cluster
        self._run = run
        self._job = job
        self._bundle = bundle
        self._evaluate = evaluate
        self._steps = steps
        self._retention = retention_of(
            checkpoint, decay_from, evaluates_beside=evaluate is not None and evaluate.is_beside
        )
        self._faults = faults
        # Replaced and never modified, because `status` reads it from another thread.
        self._waiting: dict[int, WaitingCommit] = {}
        """The waiting commits by step, including the one in evaluation."""
        self._gang: Gang | None = None
        """The worker, while there is one."""
        self._avoid: frozenset[str] = frozenset()
        """Addresses of nodes that compute wrongly."""
        self._step: int | None = None
        """The step in evaluation, None while no process evaluates."""
        self._batches = 0
        """How many batches the process has evaluated."""
        self._work: Work | None = None
        """How far it is."""
        self._moved = 0.0
        """The monotonic time of the last progress: a batch, a start, or the request for a worker."""
        self._waits_for = ""
        """The last reported reason why an evaluation waits."""
        self.news = News()
        """Lines that `news` has not returned yet."""
        self._tried: set[int] = set()
        """Steps whose evaluation was started at least once."""
        self._failure = ""
        """Why the evaluation failed since the last `look`."""
        self.failed = ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The steps of the waiting commits in order, including the one in evaluation."""
        return tuple(self._waiting)

    @property
    def text(self) -> str:
        """A line about the commit in evaluation and those that wait; empty without any."""
        waiting = self.waiting
        if not waiting:
            return ""
        first, *later = waiting
        if self._gang is None:
            text = f"step {first} waits to be evaluated"
        elif self._step == first and self._work:
            text = work_text(self._work)
        else:
            text = f"step {first} is about to be evaluated"
        return text + (f"; {len(later)} more wait" if later else "")

    def occupied_workers(self) -> int:
        """Return how many workers the evaluation occupies."""
        return self._gang.occupied_workers() if self._gang is not None else 0

    def find(self, history: RunHistory) -> None:
        """Find the waiting commits. An evaluation in progress continues if its checkpoint is still among them.

        If evals.jsonl has the row of a commit that does not hold it, the row is attached to the commit.
        """
        if self._evaluate is None or not self._evaluate.is_beside:
            return
        store = history.commits.store
        waiting: dict[int, WaitingCommit] = {}
        evaluated = {row["step"]: row for row in history.files.evaluations.rows.newest()}
        for step in store.steps():
            try:
                commit = store.manifest(step)
            except CorruptCommit:
                continue
            if not awaits(store, commit):
                continue
            if (row := evaluated.get(step)) is not None and is_of(row, commit):
                attach(store, row)
                continue
            layout = Layout.from_json(commit.meta["layout"])
            waiting[step] = WaitingCommit(step, commit.meta["attempt"], layout.micro_batch)
        if self._step is not None and waiting.get(self._step) != self._waiting.get(self._step):
            self.stop()
        self._waiting = waiting

    def store_results(self, history: RunHistory) -> None:
        """Store all results, find the waiting commits, and remove commits that are not kept.

        Call it while no ranks run. With all results stored it is known which commit is the best.
        """
        history.files.wait_until_stored()
        self.find(history)
        prune(history.commits.store, self._retention)

    def published(self, step: int, state: State) -> None:
        """Note a new commit of the attempt in `state`. It waits from now on if the job asks for its evaluation."""
        is_due = self._evaluate is not None and self._evaluate.is_due_beside(step, self._steps)
        if is_due and step not in self._waiting:
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
        """Evaluate the commit that `state.evaluating` names, and stop any other evaluation.

        It avoids the nodes in `state.wrong_nodes`, and restarts the evaluation when that set changes. Returns at once.
        Later calls place a worker and start the process in it.

        Args:
            state: the state that was decided on.
            data: the prepared data, which includes the held-out text.
            shards: its digest.
            base: the pretrained weights that the run began with.
            folder_config: the configuration of a pretrained folder, as the run keeps it.
        """
        if state.evaluation_waits and not self._waits_for:
            self.news.add(f"{self.text}: there is no {state.evaluation_waits}")
        step = state.evaluating
        self._waits_for = state.evaluation_waits
        is_other = self._step is not None and self._step != step
        if step is None or is_other or state.wrong_nodes != self._avoid:
            self.stop()
        self._avoid = state.wrong_nodes
        if step is None or self._step is not None or step not in self._waiting:
            return
        if self._gang is None:
            self._gang = self._cluster.gang()
            self._moved = time.monotonic()
            self._gang.prewarm(1, self._bundle, ENTRY, avoid=self._avoid)
        self._gang.poll(0)
        if self._gang.ready():
            try:
                task = self._task(self._waiting[step], data, shards, base, folder_config)
                output = output_of_evaluation(self._run.uri, step)
                self._gang.start(1, self._bundle, ENTRY, task.to_json(), avoid=self._avoid, output=output)
            except TimeoutError as error:
                self._fail(step, str(error))
                return
            self._step = step
            self._batches = 0
            self._work = None
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > PLACEMENT:
            self._fail(step, f"no worker was ready for it within {PLACEMENT:.0f} s")

    def look(self, history: RunHistory) -> None:
        """Poll the evaluation. Add its row to the history when it has ended."""
        if self._gang is not None and self._step is not None:
            self._look(history, self._gang.poll(0), self._step)
        self.failed = self._failure
        self._failure = ""

    def _look(self, history: RunHistory, status: GangStatus, step: int) -> None:
        rank = status.ranks[0]
        if rank.evaluated_batches != self._batches:
            self._batches = rank.evaluated_batches
            self._moved = time.monotonic()
        self._work = rank.work
        if rank.state == "done":
            self._step = None
            self._forget(step)
            history.files.add_evaluation(rank.result["evaluation"])
        elif why := self._problem_of(rank, status.at):
            if rank.cause.kind == "corrupt_commit":  # another try would fail, too
                self._forget(step)
            self._fail(step, why)

    def _forget(self, step: int) -> None:
        self._waiting = {other: commit for other, commit in self._waiting.items() if other != step}

    def stop(self) -> None:
        """Stop the evaluation in progress, and free the worker."""
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
        """Return the task of the evaluating process."""
        # Faults are injected in the first try only, as in the first attempt of a run.
        faults = () if commit.step in self._tried else self._faults
        self._tried.add(commit.step)
        return Task.for_evaluation(
            self._job,
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

    def _problem_of(self, rank: RankStatus, at: float) -> str:
        """Return why the process will give no result, as of the monotonic time `at`; empty if it still may."""
        if rank.state in FINISHED:
            return rank.error or "its process ended"
        if at - rank.last_heartbeat > SILENCE:
            return f"no sign of life for {SILENCE:.0f} s"
        still = at - self._moved > EVALUATION_PATIENCE
        return f"no progress for {EVALUATION_PATIENCE:.0f} s" if still else ""

    def _fail(self, step: int, why: str) -> None:
        self._failure = why if step in self._waiting else ""
        again = "" if step in self._waiting else "; it stays without one"
        self.news.add(f"the evaluation of step {step} failed: {why}{again}")
        self.stop()

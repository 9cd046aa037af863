"""Export commits and evaluate tasks in a separate process during training, one at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.workers.cluster import Cluster, RemoteTask
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.config.errors import InputError
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.evaluate.on_tasks import evaluate_commit_on_tasks
from orchestrator.export import hub
from orchestrator.export import hugging_face as export
from orchestrator.export.target import mark_of
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir

LONGEST_TASKS = 7200.0
"""Seconds that the evaluation of tasks may take. The command `evaluate --tasks` runs longer ones."""


class FinalTasks:
    """Evaluates the tasks of a job on the run's last commit, or on its best one if the job keeps that.

    A failure is reported and does not fail the run.

    Attributes:
        done: whether the evaluation has ended, or there are no tasks.
    """

    def __init__(
        self,
        cluster: Cluster,
        checkpoint: CheckpointSpec,
        evaluate: EvaluateSpec | None,
        run: RunDir,
        tell: Callable[..., None],
    ) -> None:
        """`tell` gets a line about the outcome, and the row of a success as `tasks`."""
        self._cluster = cluster
        self._run = run
        self._tell = tell
        self._paths = list(evaluate.tasks) if evaluate else []
        self._best = checkpoint.best_metric is not None
        self._task: RemoteTask | None = None
        """The evaluation in progress."""
        self._began = 0.0
        """The monotonic time at which it began."""
        self.done = not self._paths

    def advance(self, step: int) -> None:
        """Start the evaluation of a run that ends at `step`, or take its result if it has ended."""
        if self._task is None:
            self._began = time.monotonic()
            self._task = self._cluster.run_task(
                evaluate_commit_on_tasks, self._run.uri, step, self._paths, self._best
            )
            return
        late = time.monotonic() - self._began > LONGEST_TASKS
        if not self._task.done() and not late:
            return
        self.done = True
        try:
            if late:
                raise TimeoutError(f"it was not done after {LONGEST_TASKS:.0f} s")
            row: EvaluationRow = self._task.result()
            self._tell(f"tasks at step {row['step']}: {in_words(row)}", tasks=row)
        except Exception as error:  # any error, since the training itself has succeeded
            why = " ".join(str(error).split())[:300]
            self._tell(f"the tasks were not evaluated: {type(error).__name__}: {why}")
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop the evaluation in progress, if any."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


def in_words(row: EvaluationRow) -> str:
    """Return the first metric of each task as text."""
    return ", ".join(
        f"{name} {next(iter(metrics))} {next(iter(metrics.values())):.4g}"
        for name, metrics in row["sets"].items()
    )


LONGEST = 7200.0
"""Seconds that an export may take. That is enough for a hundred billion parameters at 200 MB per second."""
LONGEST_PUSH = 7200.0
"""Seconds that the upload of an export may take."""
OF_THE_FOLDER = ("receipt", "run", "evaluation", "files")
"""Keys of export.json that `export` does not return."""


def export_commit(run_uri: str, step: int, target: str) -> dict[str, Any]:
    """Export a commit of a run that is still training. For the result see `export`.

    Args:
        run_uri: the run directory.
        step: the step of the commit. If it has been removed meanwhile, the newest commit is exported.
        target: the folder to write.
    """

    def choose(store: Store, _: int | None) -> int:
        newest = None if step in store.steps() else store.latest(deep=False)
        return newest.step if newest else step

    def write(chosen_step: int) -> dict[str, Any]:
        return export.export(run_uri, chosen_step, target)

    return read_chosen(Store(RunDir(run_uri).commits), None, write, choose)


@dataclass(frozen=True)
class Wanted:
    """The checkpoint to export: the one at `step`, or with `best` the best one up to there."""

    step: int
    best: bool = False


class BackgroundExport:
    """Exports commits of a run to the folder that its job names, and pushes the last export if the job wants that.

    A push that fails, or takes too long, is reported and does not fail the run.

    Attributes:
        done: what `export` returned for the last export, empty before the first. After a push also `pushed`, the
            address, or `not_pushed`, why the Hub has no export.
        tasks: evaluates the tasks of the job after the last export.
    """

    def __init__(
        self,
        cluster: Cluster,
        checkpoint: CheckpointSpec,
        evaluate: EvaluateSpec | None,
        run: RunDir,
        tell: Callable[..., None],
    ) -> None:
        """`tell` gets a line about each export that failed, and about the push."""
        self._cluster = cluster
        self._checkpoint = checkpoint
        self._run = run
        self._tell = tell
        self._target = checkpoint.export_to or run.at("export")
        self._task: tuple[Wanted, RemoteTask] | None = None
        """The export in progress."""
        self._began = 0.0
        """The monotonic time at which it began."""
        self._mark_before = ""
        """The mark of the target folder before it, see `mark_of`."""
        self._failures: dict[Wanted, str] = {}
        """Why exports failed."""
        self._push: RemoteTask | None = None
        """The push in progress."""
        self._push_began = 0.0
        """The monotonic time at which it began."""
        self._exported: Wanted | None = None
        """The last successful export."""
        self.done: dict[str, Any] = {}
        self.tasks = FinalTasks(cluster, checkpoint, evaluate, run, tell)

    def has_last(self, step: int) -> bool:
        """Whether the last export is the final model of a run that ends at `step`, and a push of it has ended."""
        return self._exported == self._last(step) and self._push_has_ended

    @property
    def _push_has_ended(self) -> bool:
        """Whether the last export is pushed, or that failed, or nothing is to be pushed."""
        return self._checkpoint.push is None or bool(self.done.keys() & {"pushed", "not_pushed"})

    def failed(self, step: int) -> str:
        """Return why the export of a run that ends at `step` failed; empty if it did not."""
        return self._failures.get(self._last(step), "")

    def check_push(self) -> None:
        """Tell of a push that will not be possible, such as for want of a token here, while training is young."""
        if self._checkpoint.push is not None:
            try:
                hub.check_push(self._checkpoint.push, self._target, "checkpoint.push")
            except InputError as problem:
                self._tell(f"the export will not be pushed: {problem}")

    def published(self, step: int) -> None:
        """Note a new commit. It is exported if the job wants an export of each."""
        if self._checkpoint.export and self._checkpoint.export_at == "commit":
            self._advance(Wanted(step), in_background=True)

    def advance(self, step: int) -> None:
        """Start or continue the export of a run that ends at `step`, and then its push.

        It exports the last commit, or the best by an evaluation.
        """
        last = self._last(step)
        if self._exported != last:
            self._advance(last)
        if self._exported == last:
            self._advance_push()

    def _last(self, step: int) -> Wanted:
        return Wanted(step, best=self._checkpoint.best_metric is not None)

    def try_again(self) -> None:
        """Forget earlier failures, so that a failed export is tried again."""
        self._failures.clear()

    def stop_export(self, step: int) -> bool:
        """Stop the export or the push in progress. Return whether the final model of a run that ends at `step` is
        exported.

        A stopped export may already have published its folder; the folder's mark tells.
        """
        if self._task is not None:
            wanted, task = self._task
            if task.done():
                self._advance(wanted)
            else:
                self.stop()
                if (mark := mark_of(self._target)) not in ("", self._mark_before):
                    facts = json.loads(mark)
                    self.done = {"uri": self._target, "sample": None}
                    self.done |= {key: value for key, value in facts.items() if key not in OF_THE_FOLDER}
                    self._exported = wanted if wanted.best else Wanted(facts["step"])
        if self._exported == self._last(step):
            self._advance_push(stop=True)
        return self.has_last(step)

    def stop(self) -> None:
        """Stop the export, push and evaluation in progress. A stopped export leaves its target unchanged."""
        self.tasks.stop()
        if self._push is not None:
            self._push.cancel()
            self._push = None
        if self._task is not None:
            _, task = self._task
            task.cancel()
            self._task = None

    def _advance_push(self, stop: bool = False) -> None:
        """Start the push of the last export, or take its result if it has ended. With `stop` it ends now."""
        repo = self._checkpoint.push
        if repo is None or self._push_has_ended:
            return
        try:
            if self._push is None and not stop:
                self._tell(f"step {self.done['step']} is exported; the export is now pushed to {repo}")
                self._push_began = time.monotonic()
                self._push = self._cluster.run_task(hub.push, self._target, repo, True, True)
                return
            if self._push is not None and self._push.done():
                self.done |= {"pushed": self._push.result()}
                self._tell(f"the export is pushed to {self.done['pushed']}")
            elif stop:
                raise TimeoutError("the run is stopped before the push is done")
            elif time.monotonic() - self._push_began > LONGEST_PUSH:
                raise TimeoutError(f"it was not done after {LONGEST_PUSH:.0f} s")
            else:
                return
        except Exception as error:  # any error, since the export itself has succeeded
            why = " ".join(str(error).split())[:400] or type(error).__name__
            self.done |= {"not_pushed": why}
            again = f"`orchestrator checkpoint export {self._run.uri} --push {repo}` does it"
            self._tell(f"the export is not pushed: {why}; {again}")
        self.stop()

    def _advance(self, wanted: Wanted, in_background: bool = False) -> None:
        """Take the result of an export that has ended, and start the wanted one unless one is in progress.

        Args:
            wanted: what to export.
            in_background: whether the run is still training. A later export then serves as well.
        """
        if self._task is not None:
            exported, task = self._task
            late = time.monotonic() - self._began > LONGEST
            if not task.done() and not late:
                return
            try:
                if late:
                    self.stop()
                    raise TimeoutError(f"it was not done after {LONGEST:.0f} s")
                self.done = task.result()
                self._exported = exported if exported.best else Wanted(self.done["step"])
                self._failures.pop(exported, None)
            except Exception as error:  # any error, since training continues
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self._failures[exported] = why
                self._tell(f"the export of step {exported.step} failed: {why}")
                if exported == wanted:
                    return
            finally:
                self._task = None
        if self._exported == wanted or (
            in_background and self._exported and wanted.step < self._exported.step
        ):
            return
        self._began = time.monotonic()
        self._mark_before = mark_of(self._target)
        uri = self._run.uri
        step = wanted.step
        target = self._target
        if in_background:
            task = self._cluster.run_task(export_commit, uri, step, target)
        else:
            task = self._cluster.run_task(export.export, uri, step, target, wanted.best)
        self._task = (wanted, task)

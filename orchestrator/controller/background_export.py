"""Exports in a process beside training, one at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.workers.cluster import Cluster, RemoteTask
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.checkpoint.store import Store
from orchestrator.config.spec import JobSpec
from orchestrator.evaluate.on_tasks import evaluate_commit_on_tasks
from orchestrator.export import hugging_face as export
from orchestrator.export.target import mark_of
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir

LONGEST_TASKS = 7200.0
"""Seconds that the evaluation may take; a longer one has the command `evaluate --tasks`."""


class FinalTasks:
    """Evaluates the commit that a run ends with, or the best one where the job keeps it. `tell` hears, in a line,
    of the row, which comes as `tasks`, or of an evaluation that failed: it takes nothing from the run."""

    def __init__(self, cluster: Cluster, spec: JobSpec, run: RunDir, tell: Callable[..., None]) -> None:
        self._cluster, self._run, self._tell = cluster, run, tell
        self._paths = list(spec.evaluate.tasks) if spec.evaluate else []
        self._best = spec.checkpoint.best_metric is not None
        self._under_way: RemoteTask | None = None
        self._began = 0.0
        self.done = not self._paths

    def advance(self, step: int) -> None:
        """Go on with the evaluation of a run that ends at that step."""
        if self._under_way is None:
            self._began = time.monotonic()
            arguments = self._run.uri, step, self._paths, self._best
            self._under_way = self._cluster.run_task(evaluate_commit_on_tasks, *arguments)
            return
        late = time.monotonic() - self._began > LONGEST_TASKS
        if not self._under_way.done() and not late:
            return
        self.done = True
        try:
            if late:
                raise TimeoutError(f"it was not done after {LONGEST_TASKS:.0f} s")
            row: EvaluationRow = self._under_way.result()
            self._tell(f"tasks at step {row['step']}: {in_words(row)}", tasks=row)
        except Exception as error:  # whatever it is, the run is trained
            why = " ".join(str(error).split())[:300]
            self._tell(f"the tasks were not evaluated: {type(error).__name__}: {why}")
        finally:
            self.stop()

    def stop(self) -> None:
        """End the evaluation that is under way, if there is one."""
        if self._under_way is not None:
            self._under_way.cancel()
            self._under_way = None


def in_words(row: EvaluationRow) -> str:
    """The first metric of each task."""
    return ", ".join(
        f"{name} {next(iter(metrics))} {next(iter(metrics.values())):.4g}"
        for name, metrics in row["sets"].items()
    )


LONGEST = 7200.0
"""Seconds that an export may take: a hundred billion parameters are read and written within, at 200 MB a second."""
OF_THE_FOLDER = ("receipt", "run", "evaluation", "files")
"""What export.json holds beside what `export` returns."""


def export_commit(run_uri: str, step: int, target: str) -> dict[str, Any]:
    """Export the commit at `step` of a run that trains on; where that is removed already, the newest. As `export`."""

    def choose(store: Store, _: int | None) -> int:
        newest = None if step in store.steps() else store.latest(deep=False)
        return newest.step if newest else step

    def write(there: int) -> dict[str, Any]:
        return export.export(run_uri, there, target)

    return read_chosen(Store(RunDir(run_uri).commits), None, write, choose)


@dataclass(frozen=True)
class Wanted:
    """What is to be exported: the commit at `step`, or the `best` of those that were evaluated up to there."""

    step: int
    best: bool = False


class BackgroundExport:
    """Writes commits of a run where its job says. `tell` hears, in a line, of an export that failed; `tasks` are
    evaluated after the last one."""

    def __init__(self, cluster: Cluster, spec: JobSpec, run: RunDir, tell: Callable[..., None]) -> None:
        self._cluster, self._checkpoint, self._run, self._tell = cluster, spec.checkpoint, run, tell
        self._target = spec.checkpoint.export_to or run.at("export")
        self._under_way: tuple[Wanted, RemoteTask] | None = None
        self._began, self._before = 0.0, ""
        self._failures: dict[Wanted, str] = {}
        self._exported: Wanted | None = None
        self.done: dict[str, Any] = {}
        self.tasks = FinalTasks(cluster, spec, run, tell)

    def has_last(self, step: int) -> bool:
        """Whether what was exported last is the model of a run that ends at that step."""
        return self._exported == self._last(step)

    def failed(self, step: int) -> str:
        """Why the export of a run that ends at that step failed, empty if it did not."""
        return self._failures.get(self._last(step), "")

    def published(self, step: int) -> None:
        """Hear of a commit; it is exported if the job wants each of them."""
        if self._checkpoint.export and self._checkpoint.export_at == "commit":
            self._advance(Wanted(step), beside=True)

    def advance(self, step: int) -> None:
        """Go on with the export of a run that ends at that step: its last commit, or the best by an evaluation."""
        self._advance(self._last(step))

    def _last(self, step: int) -> Wanted:
        return Wanted(step, best=self._checkpoint.best_metric is not None)

    def try_again(self) -> None:
        """Forget the failures so far."""
        self._failures.clear()

    def settle(self, step: int) -> bool:
        """End what is under way, and tell whether the model of a run that ends at that step is there: it may have been
        published in this very moment, while its process was still to say so."""
        if self._under_way is not None:
            wanted, run_task = self._under_way
            if run_task.done():
                self._advance(wanted)
                return self.has_last(step)
            self.stop()
            if (mark := mark_of(self._target)) not in ("", self._before):
                facts = json.loads(mark)
                self.done = {"uri": self._target, "sample": None}
                self.done |= {key: value for key, value in facts.items() if key not in OF_THE_FOLDER}
                self._exported = wanted if wanted.best else Wanted(facts["step"])
        return self.has_last(step)

    def stop(self) -> None:
        """End what is under way, if there is something: an export leaves nothing in its place."""
        self.tasks.stop()
        if self._under_way is not None:
            self._under_way[1].cancel()
            self._under_way = None

    def _advance(self, wanted: Wanted, beside: bool = False) -> None:
        """Take the result of an export that has ended, and start what is wanted unless one is under way; `beside`
        training, a later one does as well."""
        if self._under_way is not None:
            exported, run_task = self._under_way
            late = time.monotonic() - self._began > LONGEST
            if not run_task.done() and not late:
                return
            try:
                if late:
                    self.stop()
                    raise TimeoutError(f"it was not done after {LONGEST:.0f} s")
                self.done = run_task.result()
                self._exported = exported if exported.best else Wanted(self.done["step"])
                self._failures.pop(exported, None)
            except Exception as error:  # whatever it is, training goes on
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self._failures[exported] = why
                self._tell(f"the export of step {exported.step} failed: {why}")
                if exported == wanted:
                    return
            finally:
                self._under_way = None
        if self._exported == wanted or (beside and self._exported and wanted.step < self._exported.step):
            return
        self._began, self._before = time.monotonic(), mark_of(self._target)
        arguments = self._run.uri, wanted.step, self._target
        call = (export_commit, *arguments) if beside else (export.export, *arguments, wanted.best)
        self._under_way = (wanted, self._cluster.run_task(*call))

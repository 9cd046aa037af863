"""The tasks of a job, evaluated once after its training, in a process beside the controller."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.workers.cluster import Cluster, RemoteTask
from orchestrator.config.spec import JobSpec
from orchestrator.evaluate.on_tasks import evaluate_commit_on_tasks
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir

LONGEST = 7200.0
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
        late = time.monotonic() - self._began > LONGEST
        if not self._under_way.done() and not late:
            return
        self.done = True
        try:
            if late:
                raise TimeoutError(f"it was not done after {LONGEST:.0f} s")
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

"""The rows of evals.jsonl: those that rows of steps carry, and those of evaluations beside the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.checkpoint.evaluations import attach
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.store import Store
from orchestrator.config.spec import JobSpec
from orchestrator.storage.retry import storage_failed
from orchestrator.storage.row_line import EVALS, Row
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir


class EvaluationRows:
    """Writes `rows`; those of evaluations beside the run are added to their commits too, once they are stored."""

    def __init__(self, spec: JobSpec, run: RunDir, store: Store, stored: Callable[[], None]) -> None:
        """`stored` is called after rows of evaluations beside the run were."""
        self._beside = spec.evaluates_beside
        self._store, self._stored = store, stored
        self.rows = RowWriter(run, EVALS, stored=self._attach)
        self.latest: Row | None = None
        """The last one of this controller."""

    def withdraw(self, step: int) -> None:
        """Remove the rows after that step; called before the commits beyond it are removed, so that nothing is added to
        those any more."""
        self.rows.cut(step, ())

    def cut(self, step: int, commit: CommitManifest | None, carried: Sequence[Row]) -> None:
        """Go back to `step` and its commit. `carried` are the evaluations in the rows of the latest steps.

        One of the ranks of which the commit does not know is made again.
        """
        known = self._beside or (commit is not None and commit.meta.get("last_evaluation_step") == step)
        self.rows.cut(step if known else step - 1, carried)

    def _attach(self, rows: Sequence[Row]) -> None:
        self.latest = rows[-1] if rows else self.latest  # a cut stores none
        if not self._beside:
            return
        self._stored()
        try:
            for row in rows:
                attach(self._store, row)
        except Exception as error:  # the next who looks for what waits makes up for it
            if not storage_failed(error):
                raise

"""The rows of evaluations, in evals.jsonl and in commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import attach
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.storage.retry import storage_failed
from orchestrator.storage.row_line import EVALS, Row
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir


class EvaluationRows:
    """Writes evals.jsonl. With background evaluation, it also attaches each stored row to the commit it evaluates.

    Attributes:
        rows: the writer of evals.jsonl.
        latest: the newest row that this controller has stored, None before the first.
    """

    def __init__(self, evaluates_beside: bool, run: RunDir, store: Store, stored: Callable[[], None]) -> None:
        """`stored` is called after rows of background evaluations are stored."""
        self._is_beside = evaluates_beside
        self._store = store
        self._on_stored = stored
        self.rows = RowWriter(run, EVALS, stored=self._attach)
        self.latest: Row | None = None

    def withdraw(self, step: int) -> None:
        """Remove the rows after `step`.

        Call it before the commits after `step` are removed, so that no row is attached to one of those.
        """
        self.rows.cut(step, ())

    def cut(self, step: int, commit: CommitManifest | None, carried: Sequence[Row]) -> None:
        """Roll back to `step`.

        An evaluation by the ranks at `step` that the commit does not mention is removed, because it is run again.

        Args:
            step: the step to return to.
            commit: the commit at `step`, None at step 0.
            carried: the evaluations in the rows of the latest steps.
        """
        is_known = self._is_beside or (commit is not None and commit.meta.get("last_evaluation_step") == step)
        self.rows.cut(step if is_known else step - 1, carried)

    def _attach(self, rows: Sequence[Row]) -> None:
        if rows:  # a cut stores none
            self.latest = rows[-1]
        if not self._is_beside:
            return
        self._on_stored()
        try:
            for row in rows:
                attach(self._store, row)
        except Exception as error:  # the next search for waiting commits attaches the row
            if not storage_failed(error):
                raise

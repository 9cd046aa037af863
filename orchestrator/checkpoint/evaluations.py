"""The evaluation of a commit: in its manifest where the ranks made it, else a file that is added to its folder.

Torch-free. A commit that asks for one says so in its manifest. The file has the row of evals.jsonl, checksum included;
it counts for the commit of its attempt only, so that one of a commit that was made again is never taken for another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.manifest import CommitManifest, commit_folder
from orchestrator.checkpoint.store import Store
from orchestrator.config.metric_names import by_name
from orchestrator.storage.file_names import EVALUATION
from orchestrator.storage.row_line import EVALS, Row, decode, encode

if TYPE_CHECKING:  # the process that writes commits imports this module and no job files
    from orchestrator.config.spec import JobSpec

TO_EVALUATE = "to_evaluate"
"""In a manifest: whether the commit is to be evaluated beside the run."""
MEASURED = "measured"
"""In a manifest, and in the row of an evaluation: how the job measures, see `measure_of`."""


def measure_of(spec: JobSpec) -> dict[str, int | None]:
    """What of a job decides the values of its evaluations and may change while its run goes on: how many global batches
    of a set are read, and over how many commits the weights are averaged. Values measured otherwise are not compared.
    """
    batches = spec.evaluate.batches if spec.evaluate else None
    return {"batches": batches, "averaged": spec.checkpoint.averaged if spec.evaluates_beside else 0}


def attach(store: Store, row: Row) -> None:
    """Add the row of an evaluation to the commit of its step, which is there. Raises what storage raises."""
    store.retry(store.backend.replace, _path(row["step"]), encode(row))


def is_of(row: Row, commit: CommitManifest) -> bool:
    """Whether a row is of that very commit, and not of another that there was of its step."""
    return (row["step"], row["attempt"]) == (commit.step, commit.meta.get("attempt"))


def attached(store: Store, commit: CommitManifest) -> Row | None:
    """The row that was added to a commit; None if there is none, or it is damaged."""
    try:
        row = decode(store.retry(store.backend.read, _path(commit.step)).strip(), EVALS)
    except FileNotFoundError:
        return None
    return row if row is not None and is_of(row, commit) else None


def metrics_of(store: Store, commit: CommitManifest) -> Mapping[str, Any]:
    """The metrics of a commit by name, as in validation.loss; empty if it was not evaluated."""
    return evaluated(store, commit)[0]


def evaluated(store: Store, commit: CommitManifest) -> tuple[Mapping[str, Any], Any]:
    """The metrics of a commit, see `metrics_of`, and how they were measured; None for what is not known."""
    if commit.meta.get("last_evaluation_step") == commit.step:
        return dict(commit.meta.get("evaluation", {})), commit.meta.get(MEASURED)
    row = attached(store, commit) if commit.meta.get(TO_EVALUATE) else None
    return (by_name(row["sets"]), row.get(MEASURED)) if row else ({}, None)


def awaits(store: Store, commit: CommitManifest) -> bool:
    """Whether the commit is to be evaluated, and has not been."""
    return bool(commit.meta.get(TO_EVALUATE)) and attached(store, commit) is None


def _path(step: int) -> str:
    return f"{commit_folder(step)}/{EVALUATION}"

"""The contract of a sink: where the rows and events of a run are copied to.

To add one, write `<key>_sink.py` in this folder, with `LIBRARY` and `build(context)`, and its part of the job file in
`orchestrator.observe.sinks.config`. A sink of the user's own is named in `sinks.own`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.config.metric_names import by_name
from orchestrator.storage.row_line import Row, evaluations_in, layers_in
from orchestrator.storage.run_directory import RunDir

NO_METRICS = frozenset({"time", "step", "attempt", "number"})
"""Numbers of a row that are coordinates of its metrics."""


@dataclass(frozen=True)
class SinkContext:
    """The arguments from which a sink is built.

    Attributes:
        config: its part of the job file's `sinks`.
        job_name: the name of the job.
        job: the whole job as JSON, secrets hidden.
        run: the run directory.
        began: when the run began, in unix seconds. With the directory it identifies the run.
    """

    config: Any
    job_name: str
    job: dict[str, Any]
    run: RunDir
    began: float


class Sink(Protocol):
    """Takes the rows and events of a run, each once and in order.

    A step that is trained again after a failure may come a second time. Every method may raise what its library
    raises: the sink is then built again after a pause, and receives the rows and events after its `last_step` and
        `last_event`.
    """

    last_step: int
    """The last step that the sink has. It receives later rows only."""
    last_event: int
    """The number of the last event that the sink has."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Take these rows of metrics.jsonl. If the first row is not after `last_step`, all later steps that the sink
        has are void: the run returned to a checkpoint."""

    def events(self, events: Sequence[Row]) -> None:
        """Take these rows of events.jsonl, secrets hidden."""

    def close(self) -> None:
        """Deliver everything that was taken."""


def metrics_of(row: Row) -> dict[str, float]:
    """The numbers of a row, those of its layers, and those of its evaluations, named as in validation.loss."""
    result = {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in NO_METRICS
    }
    result |= layers_in(row)
    for evaluation in evaluations_in([row]):
        result |= {key: float(value) for key, value in by_name(evaluation["sets"]).items()}
    return result

"""What a sink is, and what it makes of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestrator.config.metric_names import by_name
from orchestrator.storage.row_line import Row, evaluations_in

NO_METRICS = frozenset({"time", "step", "attempt", "number"})
"""Numbers of a row that are coordinates of its metrics."""


class Sink(Protocol):
    """Takes rows of steps and events, each once and in order, a step that was trained again on other samples once more.

    Every method may raise whatever its library does; then the sink is made anew, and told from where it says it is.
    """

    last_step: int
    """The last step that it has; rows up to it are not given again."""
    last_event: int
    """The number of the last event that it has."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Take these rows of metrics.jsonl. Where the first is not after `last_step`, what is beyond it never was."""

    def events(self, events: Sequence[Row]) -> None:
        """Take these rows of events.jsonl, secrets hidden."""

    def close(self) -> None:
        """Have all delivered that was taken."""


def metrics_of(row: Row) -> dict[str, float]:
    """The numbers of a row, and those of the evaluations that it carries, named as in validation.loss."""
    found = {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in NO_METRICS
    }
    for evaluation in evaluations_in([row]):
        found |= {key: float(value) for key, value in by_name(evaluation["sets"]).items()}
    return found

"""A sink that writes the loss of each step to a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.observe.sinks.sink import SinkContext


class CsvSink:
    """Rows (step, loss) of a run in the file that the option `path` names.

    Args:
        context: `config` has the options from the job file.
    """

    last_event = 0

    def __init__(self, context: SinkContext) -> None:
        self._path = Path(context.config["path"])
        self._losses: dict[int, float] = {}
        if self._path.exists():
            with self._path.open(newline="") as file:
                self._losses = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}
        self.last_step = max(self._losses, default=-1)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write these rows. Later steps are void: the run returned to a checkpoint."""
        if not rows:
            return
        first = rows[0]["step"]
        self._losses = {step: loss for step, loss in self._losses.items() if step < first}
        self._losses |= {row["step"]: row["loss"] for row in rows}
        self.last_step = rows[-1]["step"]
        with self._path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "loss"])
            writer.writerows(self._losses.items())

    def events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take events; this sink has no use for them."""
        if events:
            self.last_event = events[-1]["number"]

    def close(self) -> None:
        """Nothing is left to deliver: `rows` writes at once."""

"""What a sweep knows of its trials, in its own directory: which there are, with which values, and how they ended.

    <sweep>/job.yaml       as resolved
    <sweep>/trials.jsonl   a row when a trial is drawn, before it begins, one when it comes to a rung, and one when it
                           has ended; now and then one with the hours that the search has taken
    <sweep>/0003/          the run of trial 0003; 0003-1 the one that it went on in after its first exploit

Whatever kills a sweep, these rows and the run directories are all that the next command needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.storage.row_line import TRIALS, Row
from orchestrator.storage.row_writer import Rows
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.space import Config

PATIENCE = 60.0
"""Seconds that storage may refuse what must be written before a search goes on."""
TOLD = ("run", "step", "value", "own_steps", "cost_usd")
"""Of what a trial tells at a rung, what is written down."""


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended: done, stopped by the scheduler, or failed; `value` of the metric at `step`."""

    state: str
    run: str
    step: int
    value: float | None
    reason: str = ""


class TrialRecords:
    """The rows of trials.jsonl. One process writes them, under the lock of the sweep.

    Raises OSError, in words, if storage takes neither the draw of a trial nor its end; what is told between waits.
    """

    def __init__(self, sweep: RunDir) -> None:
        self._rows = Rows(sweep, TRIALS)
        self.configs: dict[str, Config] = {}
        self.ended: dict[str, TrialEnd] = {}
        self.told: dict[str, dict[str, Any]] = {}
        """By run: what its trial told last."""
        self.hours = 0.0
        """That the search has taken, as last written down."""
        for row in sweep.rows(TRIALS):
            self._read(row)

    def _read(self, row: Row) -> None:
        """Take in a row; one that lacks something is none."""
        trial, event = row["trial"], row["event"]
        self.hours = max(self.hours, row.get("hours") or 0.0)
        if event == "drawn" and row.get("config") is not None:
            self.configs[trial] = row["config"]
        elif event == "told" and row.keys() >= set(TOLD):
            self.told[row["run"]] = {"trial": trial, **{key: row[key] for key in TOLD}}
        elif event == "ended" and row.keys() >= TrialEnd.__dataclass_fields__.keys():
            self.ended[trial] = TrialEnd(**{key: row[key] for key in TrialEnd.__dataclass_fields__})

    def draw(self, configs: Iterable[Config]) -> list[str]:
        """Write down further trials; their names."""
        first, given = len(self.configs), list(configs)
        found = {name_of(first + number): config for number, config in enumerate(given)}
        now = time.time()
        self._rows.add([{"trial": n, "event": "drawn", "config": c, "time": now} for n, c in found.items()])
        self._rows.settle(PATIENCE)
        self.configs |= found
        return list(found)

    def tell(self, result: dict[str, Any], hours: float) -> None:
        """Write down what a trial told at a rung, if it is not what it told last."""
        told = {"trial": result["trial"], **{key: result[key] for key in TOLD}}
        if self.told.get(result["run"]) != told:
            self._rows.add([{**told, "event": "told", "time": time.time(), "hours": hours}])
            self._rows.flush()
            self.told[result["run"]] = told

    def pass_time(self, hours: float) -> None:
        """Write down how long the search has taken."""
        self._rows.add([{"trial": "", "event": "hours", "time": time.time(), "hours": hours}])
        self._rows.flush()
        self.hours = hours

    def end(self, trial: str, ended: TrialEnd) -> None:
        """Write down how a trial ended, once."""
        if trial in self.ended:
            return
        row: dict[str, Any] = {"trial": trial, "event": "ended", "time": time.time(), **vars(ended)}
        self._rows.add([row])
        self._rows.settle(PATIENCE)
        self.ended[trial] = ended


def name_of(number: int) -> str:
    """The name of a trial, and of the directory of its run."""
    return f"{number:04d}"

"""The records of a search in its directory: its trials, their values, and how they ended.

    <sweep>/job.yaml       the resolved job
    <sweep>/trials.jsonl   a row when a trial is drawn, when it reports at a rung (event "told"), and when it has ended;
                           and at the beginning and at intervals a row with the hours of the search
    <sweep>/0003/          the run of trial 0003; 0003-1 is its run after its first exploit

The next command continues from these rows and the run directories alone, after any failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.storage.row_line import TRIALS, Row
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.config import SECOND
from orchestrator.tune.space import Config

PATIENCE = 60.0
"""Seconds for which an essential write is retried."""
REPORTED = ("run", "step", "value", "own_steps", "cost_usd")
"""The keys of a result at a rung that are recorded. A search over two metrics also records SECOND."""


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended. `state` is done, stopped (by the scheduler) or failed; `value` is the metric at `step`, and
    `second` the other metric of a search over two.
    """

    state: str
    run: str
    step: int
    value: float | None
    reason: str = ""
    second: float | None = None


class TrialRecords:
    """The rows of trials.jsonl. One process writes them, under the lock of the search's directory.

    Raises OSError if a draw or an end cannot be written within PATIENCE. Results may wait for storage longer.

    Attributes:
        configs: the values of each trial.
        ended: how each trial ended.
        reported: the last result that was reported for each run.
        hours: the hours of the search, as last recorded.
    """

    def __init__(self, sweep: RunDir) -> None:
        self._rows = RowWriter(sweep, TRIALS)
        self.configs: dict[str, Config] = {}
        self.ended: dict[str, TrialEnd] = {}
        self.reported: dict[str, dict[str, Any]] = {}
        self.hours = 0.0
        self._is_begun = False
        for row in sweep.rows(TRIALS):
            self._read(row)
            self._is_begun = True

    def _read(self, row: Row) -> None:
        """Read one row. An incomplete one is ignored."""
        trial, event = row["trial"], row["event"]
        self.hours = max(self.hours, row.get("hours") or 0.0)
        if event == "drawn" and row.get("config") is not None:
            self.configs[trial] = row["config"]
        elif event == "told" and row.keys() >= set(REPORTED):
            self.reported[row["run"]] = _reported(row)
        elif event == "ended" and row.keys() >= TrialEnd.__dataclass_fields__.keys() - {SECOND}:
            known = TrialEnd.__dataclass_fields__.keys() & row.keys()
            self.ended[trial] = TrialEnd(**{key: row[key] for key in known})

    def begin(self) -> None:
        """Record the start of the search, unless it has started. The time of the first row is the time of its begin."""
        if not self._is_begun:
            self.record_hours(0.0)
            self._rows.drain(PATIENCE)
            self._is_begun = True

    def draw(self, configs: Iterable[Config]) -> list[str]:
        """Record further trials before they begin, and return their names."""
        first = len(self.configs)
        drawn = {name_of(first + number): config for number, config in enumerate(configs)}
        now = time.time()
        self._rows.add([{"trial": n, "event": "drawn", "config": c, "time": now} for n, c in drawn.items()])
        self._rows.drain(PATIENCE)
        self.configs |= drawn
        return list(drawn)

    def report(self, result: dict[str, Any], hours: float) -> None:
        """Record a result at a rung, unless it equals the last one of that run."""
        row = _reported(result)
        if self.reported.get(result["run"]) != row:
            self._rows.add([{**row, "event": "told", "time": time.time(), "hours": hours}])
            self._rows.flush()
            self.reported[result["run"]] = row

    def record_hours(self, hours: float) -> None:
        """Record the hours of the search."""
        self._rows.add([{"trial": "", "event": "hours", "time": time.time(), "hours": hours}])
        self._rows.flush()
        self.hours = hours

    def end(self, trial: str, ended: TrialEnd) -> None:
        """Record how a trial ended. Only the first call for a trial counts."""
        if trial in self.ended:
            return
        row: dict[str, Any] = {"trial": trial, "event": "ended", "time": time.time(), **vars(ended)}
        self._rows.add([row])
        self._rows.drain(PATIENCE)
        self.ended[trial] = ended


def _reported(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded of a result at a rung."""
    second = {} if result.get(SECOND) is None else {SECOND: result[SECOND]}
    return {"trial": result["trial"], **{key: result[key] for key in REPORTED}, **second}


def name_of(number: int) -> str:
    """Return the name of a trial, which is also the directory of its first run."""
    return f"{number:04d}"

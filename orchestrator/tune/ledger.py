"""What a sweep knows of its trials, in its own directory: which there are, with which values, and how they ended.

    <sweep>/job.yaml       as resolved
    <sweep>/trials.jsonl   a row when a trial is drawn, before it begins, and one when it has ended
    <sweep>/0003/          the run of trial 0003; 0003-1 the one that it went on in after its first exploit

Whatever kills a sweep, these rows and the run directories are all that the next command needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.rundir import RunDir
from orchestrator.tune.space import Config

TRIALS = "trials.jsonl"


@dataclass(frozen=True)
class Ended:
    """How a trial ended: done, stopped by the scheduler, or failed; `value` of the metric at `step`."""

    state: str
    run: str
    step: int
    value: float | None
    reason: str = ""


class Ledger:
    """The rows of trials.jsonl. One process writes them, under the lock of the sweep."""

    def __init__(self, sweep: RunDir) -> None:
        self._sweep = sweep
        self.configs: dict[str, Config] = {}
        self.ended: dict[str, Ended] = {}
        for row in sweep.rows(TRIALS):
            if row["event"] == "drawn":
                self.configs[row["trial"]] = row["config"]
            else:
                self.ended[row["trial"]] = Ended(**{key: row[key] for key in Ended.__dataclass_fields__})

    def draw(self, configs: Iterable[Config]) -> list[str]:
        """Write down further trials; their names."""
        first, given = len(self.configs), list(configs)
        found = {name_of(first + number): config for number, config in enumerate(given)}
        now = time.time()
        self._sweep.append(
            TRIALS, [{"trial": n, "event": "drawn", "config": c, "time": now} for n, c in found.items()]
        )
        self.configs |= found
        return list(found)

    def end(self, trial: str, ended: Ended) -> None:
        """Write down how a trial ended, once."""
        if trial in self.ended:
            return
        row: dict[str, Any] = {"trial": trial, "event": "ended", "time": time.time(), **vars(ended)}
        self._sweep.append(TRIALS, [row])
        self.ended[trial] = ended


def name_of(number: int) -> str:
    """The name of a trial, and of the directory of its run."""
    return f"{number:04d}"

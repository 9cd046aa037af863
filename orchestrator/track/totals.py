"""What ledger, summary and report need of the rows of a run, from one pass over them, the newest first.

A run may have millions of rows, so none is kept: sums by phase, extremes, two numbers a row for the medians, and points
for the drawings, fewer than a screen is wide.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.storage.row_line import EVENTS, LARGEST, METRICS, Row
from orchestrator.storage.run_directory import ORIGIN, RunDir
from orchestrator.track.charts import Thinned

GANG = frozenset({"start", "train"})
"""Phases in which steps are made."""
DRAWN = ("loss", "tokens_per_second", "grad_norm")
MEASURED = ("step_seconds", "tokens_per_second")


@dataclass
class Spent:
    """What the rows of one phase account for, in microseconds, and when the last of them ended."""

    data: int = 0
    commit: int = 0
    step: int = 0
    last: int = 0

    def add(self, row: Row, time: int) -> None:
        """One more row."""
        self.data += micros(row.get("data_seconds"))
        self.commit += micros(row.get("commit_seconds"))
        self.step += micros(row.get("step_seconds"))
        self.last = max(self.last, time)


class RunTotals:
    """The rows of a run whose `events` are known. A row rolls back every earlier one with its step or a later one; a
    stop that says how many of the steps up to its own were lost marks them too, since nothing may have been run again.
    """

    def __init__(self, events: Sequence[Row], first: int = 1) -> None:
        """`first` is the step that the run began with."""
        self.useful: dict[int, Spent] = {}
        """By the number of the event that began the phase: rows that count."""
        self.lost: dict[int, Spent] = {}
        """And rows whose work was lost."""
        self.lost_steps: Counter[Any] = Counter()
        """By attempt."""
        self.last: Row = {}
        """The row of the last step that counts."""
        self.layout_of: dict[int, Any] = {}
        """What an attempt began with."""
        self.first_step: dict[int, int] = {}
        """The first step of an attempt that counts."""
        self.memory_bytes: float | None = None
        self.points = {key: Thinned() for key in DRAWN}
        self.latest = 0
        """When the last row was made, microseconds since the epoch."""
        self._first, self._reached = first, 0
        self._gaps: list[tuple[int, int]] = []
        self._gangs: dict[Any, list[tuple[int, int]]] = {}
        self._signs: dict[int, int] = {}
        self._safe: dict[Any, int] = {}
        self._least: float = math.inf
        self._layouts: dict[str, int] = {}
        self._steady = {key: array("d") for key in MEASURED}
        self._warming: dict[Any, Row] = {}
        self._read(events)

    def _read(self, events: Sequence[Row]) -> None:
        starts = forward([micros(event.get("time")) for event in events])
        for index, event in enumerate(events):
            if event.get("phase") in GANG:
                self._gangs.setdefault(event.get("attempt"), []).append((starts[index], index))
            if index and event.get("phase") == "prepare":
                self._signs[starts[index]] = 0
            if event.get("phase") == "stop" and event.get("lost_steps") and event.get("step") is not None:
                attempt, safe = event.get("attempt"), event["step"] - event["lost_steps"]
                self._safe[attempt] = min(self._safe.get(attempt, safe), safe)
        self._ends = sorted(self._signs)

    def add(self, row: Row) -> None:
        """The row before the last one that was added."""
        step, attempt, time = row.get("step", 0), row.get("attempt"), micros(row.get("time"))
        self.latest = max(self.latest, time)
        if (place := bisect_left(self._ends, time)) < len(self._ends):
            self._signs[self._ends[place]] = max(self._signs[self._ends[place]], time)
        if layout := row.get("layout"):
            self._layouts.pop(str(layout), None)
            self._layouts[str(layout)] = 0
        self.layout_of[attempt or 0] = layout
        rolled_back = step >= self._least
        if not rolled_back:
            self._follow(step)
        lost = rolled_back or step > self._safe.get(attempt, math.inf)
        if mine := self._gangs.get(attempt):
            index = mine[max(bisect_right(mine, (time, math.inf)) - 1, 0)][1]
            (self.lost if lost else self.useful).setdefault(index, Spent()).add(row, time)
        if lost:
            self.lost_steps[attempt] += 1
        else:
            self._count(row, step, attempt)

    def _follow(self, step: int) -> None:
        if self._least != math.inf and step < self._least - 1:
            self._gaps.append((step + 1, int(self._least) - 1))
        self._least = step

    def _count(self, row: Row, step: int, attempt: Any) -> None:
        if step >= self.last.get("step", 0):
            self.last = row
        self.first_step[attempt or 0] = step
        before = self._warming.get(attempt)
        if before is not None:
            for key, values in self._steady.items():
                if is_number(before.get(key)):
                    values.append(before[key])
        self._warming[attempt] = row
        if is_number(row.get("memory_bytes")):
            self.memory_bytes = max(self.memory_bytes or 0, row["memory_bytes"])
        for key, points in self.points.items():
            if isinstance(row.get(key), int | float):
                points.add(float(step), float(row[key]))

    def sign_before(self, end: int) -> int:
        """When the last row before `end` was made, which is when a controller began to prepare; 0 if none was."""
        return max((self._signs[e] for e in self._ends[: bisect_right(self._ends, end)]), default=0)

    @property
    def layouts(self) -> list[str]:
        """All layouts, the first one first."""
        return list(reversed(self._layouts))

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Steps that have no row, the first and the last of each gap."""
        begun = [(self._first, int(self._least) - 1)] if self._first < self._least < math.inf else []
        return [*begun, *reversed(self._gaps)]

    def median(self, key: str) -> float | None:
        """Of what is MEASURED over the steps that count, without the first of every attempt, which warms up."""
        import numpy as np

        steady = any(self._steady.values())
        first = [row[key] for row in self._warming.values() if is_number(row.get(key))]
        values = self._steady[key] if steady else first
        return float(np.median(values)) if len(values) else None


def tally(events: Sequence[Row], newest_first: Iterable[Row], first: int = 1) -> RunTotals:
    """The tally of all these rows."""
    found = RunTotals(events, first)
    for row in newest_first:
        found.add(row)
    return found


def counted(run: RunDir) -> RunTotals:
    """The tally of what stands in a run directory."""
    first = int((run.read_json(ORIGIN) or {}).get("step", 0)) + 1
    placed = run.log(METRICS).backward()
    return tally(run.rows(EVENTS), (line.row for line in placed if line.row is not None), first)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST


def forward(times: Sequence[int], since: int = 0) -> list[int]:
    """The same times, none before an earlier one or before `since`."""
    latest = max(times[0], since) if times else 0
    out = []
    for time in times:
        latest = max(latest, time)
        out.append(latest)
    return out


def micros(seconds: Any) -> int:
    """Seconds as whole microseconds; what is no length of time is 0."""
    if not is_number(seconds):
        return 0
    return round(min(max(seconds, 0), 1e12) * 1e6)

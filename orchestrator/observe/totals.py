"""Totals of a run's metrics rows for goodput, summary and report, from one pass over them, newest first.

A run may have millions of rows, so they are not kept. Kept are sums by phase, extremes, two numbers per row for the
medians, and thinned points for the charts.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.observe.energy import Measured, measured
from orchestrator.observe.pages.charts import Thinned
from orchestrator.observe.step_parts import LATEST, StepParts
from orchestrator.storage.row_line import EVALS, EVENTS, LARGEST, METRICS, NODES, Row, evaluations_in
from orchestrator.storage.run_directory import ORIGIN, RunDir

GANG_PHASES = frozenset({"start", "train"})
"""Phases in which steps are computed."""
CHARTED = ("reward", "loss", "tokens_per_second", "grad_norm", "answer_tokens", "open_heads")
ROLLOUT = ("transfer", "generate", "reward")
"""The parts of a rollout within a step: sending weights, waiting for answers, and their rewards."""
FIRST_OF_ROLLOUT = "transfer_seconds"
"""The row of a rollout's first step alone has this field."""
LONGEST_OF = 20
MOST_LAYERS = 60
"""Steps whose statistics by layer are kept for the report. It is even, so that thinning keeps like distances."""
MEASURED = ("step_seconds", "tokens_per_second")
UPDATE = "update_seconds"
"""The key of the seconds of a step without its rollout."""


@dataclass
class PhaseTime:
    """The time of one phase's rows, in microseconds, and the time at which the last of them was written.

    `transfer`, `generate` and `reward` are the parts of a rollout, and `step` is the rest of the steps. `overlapped` is
    the time for which answers were generated during the other parts. The row of a rollout's last step has it for all
    steps of the rollout.
    """

    data: int = 0
    commit: int = 0
    evaluation: int = 0
    transfer: int = 0
    generate: int = 0
    reward: int = 0
    step: int = 0
    overlapped: int = 0
    last: int = 0
    _overlap_left: int = 0
    """What later rows of a rollout say of the time for which its earlier rows overlapped."""

    @property
    def whole(self) -> int:
        """The time of the steps with their rollouts."""
        return self.step + self.transfer + self.generate + self.reward

    def add(self, row: Row, time: int) -> None:
        """Add a row. The rows of a phase are added newest first."""
        self.data += micros(row.get("data_seconds"))
        self.commit += micros(row.get("commit_seconds"))
        self.evaluation += micros(row.get("evaluation_seconds"))
        step_seconds = left = micros(row.get("step_seconds"))
        for part in ROLLOUT:
            spent = min(micros(row.get(f"{part}_seconds")), left)
            setattr(self, part, getattr(self, part) + spent)
            left -= spent
        self.step += left
        if "overlapped_seconds" in row:
            self._overlap_left = micros(row["overlapped_seconds"])
        overlapped = min(self._overlap_left, step_seconds)
        self.overlapped += overlapped
        is_first_of_rollout = FIRST_OF_ROLLOUT in row
        self._overlap_left = 0 if is_first_of_rollout else self._overlap_left - overlapped
        self.last = max(self.last, time)


@dataclass
class RolloutSpeed:
    """Sums over the steps of a rollout, whose first step waits for the answers of all of them."""

    steps: int = 0
    seconds: float = 0.0
    update: float = 0.0
    tokens: float = 0.0

    def add(self, row: Row) -> None:
        """Add a step."""

        def number(key: str) -> float:
            return float(row[key]) if is_number(row.get(key)) else 0.0

        seconds, speed = map(number, MEASURED)
        self.steps += 1
        self.seconds += seconds
        self.update += max(seconds - sum(number(f"{part}_seconds") for part in ROLLOUT), 0.0)
        self.tokens += speed * seconds

    @property
    def means(self) -> dict[str, float]:
        """Return the seconds of a step, with and without its share of the rollout, and the tokens per second."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        values = (self.seconds / self.steps, speed)
        return dict(zip(MEASURED, values, strict=True)) | {UPDATE: self.update / self.steps}


class RunTotals:
    """The totals of a run with known `events`. `add` takes its rows, newest first.

    A row rolls back every earlier row with the same step or a later one. So does a stop event that records lost
    steps, because they may not have been computed again.
    """

    def __init__(self, events: Sequence[Row], first: int = 1) -> None:
        """`first` is the run's first step. It is not 1 if the run began from another run's commit."""
        self.useful: dict[int, PhaseTime] = {}
        """Time of the rows that count, by the index of the event that began their phase."""
        self.lost: dict[int, PhaseTime] = {}
        """Time of the rows whose work was lost, by the same index."""
        self.lost_steps: Counter[Any] = Counter()
        """Number of lost steps, by attempt."""
        self.last: Row = {}
        """The row of the last step that counts."""
        self.layout_of: dict[int, Any] = {}
        """The layout of each attempt, from its first row."""
        self.first_step: dict[int, int] = {}
        """The first step that counts, by attempt."""
        self.memory_bytes: float | None = None
        self.rank_memory: list[float] = []
        """Peak memory in bytes of each rank of the newest gang."""
        self._memory_attempt: Any = None
        self.machine: dict[str, Any] = {}
        """The machine of the newest gang's rank 0, see `this_machine`."""
        self.attention_kernels: list[str] = []
        """The attention kernels of that rank."""
        self.evaluations: list[Row] = []
        """The evaluations that count, newest first."""
        self.beside_seconds = 0.0
        """Seconds of the evaluations by extra workers."""
        self.parts = StepParts()
        """Values of the steps that count, without the first step of each attempt, which is slower."""
        self.newest: list[Row] = []
        """The last rows that count, newest first."""
        self._padding = (0.0, 0)
        self.energy = Measured()
        self.points = {key: Thinned() for key in CHARTED}
        self.layers: list[tuple[int, Row]] = []
        """The steps with statistics by layer, newest first, at most MOST_LAYERS of them at like distances."""
        self._layers_seen = 0
        self._layers_each = 1
        self.latest = 0
        """The time of the last row, in microseconds since the epoch."""
        self._first = first
        self._gaps: list[tuple[int, int]] = []
        self._gangs: dict[Any, list[tuple[int, int]]] = {}
        self._last_rows: dict[int, int] = {}
        self._last_kept: dict[Any, int] = {}
        self._lowest: float = math.inf
        self._layouts: dict[str, int] = {}
        self._steady = {key: array("d") for key in MEASURED}
        self._first_rows: dict[Any, Row] = {}
        self._rollout = RolloutSpeed()
        """The rollout of the rows added last, whose first row has not come yet."""
        self._first_rollouts: dict[Any, RolloutSpeed] = {}
        """The earliest rollout of each attempt so far."""
        self._steady_rollouts = {key: array("d") for key in (*MEASURED, UPDATE)}
        self._rollout_steps = 0
        """Steps of a complete rollout. The run's last one may have fewer."""
        self._read(events)

    def _read(self, events: Sequence[Row]) -> None:
        starts = never_back([micros(event.get("time")) for event in events])
        for index, event in enumerate(events):
            if event.get("phase") in GANG_PHASES:
                self._gangs.setdefault(event.get("attempt"), []).append((starts[index], index))
            if index and event.get("phase") == "prepare":
                self._last_rows[starts[index]] = 0
            if event.get("phase") == "stop" and event.get("lost_steps") and event.get("step") is not None:
                attempt = event.get("attempt")
                safe = event["step"] - event["lost_steps"]
                self._last_kept[attempt] = min(self._last_kept.get(attempt, safe), safe)
        self._boundaries = sorted(self._last_rows)

    def add(self, row: Row) -> None:
        """Add a row: the one before, in the file, the row added last."""
        step = row.get("step", 0)
        attempt = row.get("attempt")
        time = micros(row.get("time"))
        self.latest = max(self.latest, time)
        if (index := bisect_left(self._boundaries, time)) < len(self._boundaries):
            self._last_rows[self._boundaries[index]] = max(self._last_rows[self._boundaries[index]], time)
        if layout := row.get("layout"):
            self._layouts.pop(str(layout), None)
            self._layouts[str(layout)] = 0
        self.layout_of[attempt or 0] = layout
        rolled_back = step >= self._lowest
        if not rolled_back:
            self._follow(step)
        lost = rolled_back or step > self._last_kept.get(attempt, math.inf)
        if mine := self._gangs.get(attempt):
            index = mine[max(bisect_right(mine, (time, math.inf)) - 1, 0)][1]
            (self.lost if lost else self.useful).setdefault(index, PhaseTime()).add(row, time)
        if lost:
            self.lost_steps[attempt] += 1
        else:
            self._count(row, step, attempt)

    def _follow(self, step: int) -> None:
        if self._lowest != math.inf and step < self._lowest - 1:
            self._gaps.append((step + 1, int(self._lowest) - 1))
        self._lowest = step

    def _count(self, row: Row, step: int, attempt: Any) -> None:
        if step >= self.last.get("step", 0):
            self.last = row
        self.first_step[attempt or 0] = step
        before = self._first_rows.get(attempt)
        if len(self.newest) < LATEST:
            self.newest.append(row)
        if before is not None:
            self.parts.add(before)
            for key, values in self._steady.items():
                if is_number(before.get(key)):
                    values.append(before[key])
        self._first_rows[attempt] = row
        self._count_rollout(row, attempt)
        if is_number(row.get("memory_bytes")):
            self.memory_bytes = max(self.memory_bytes or 0, row["memory_bytes"])
        self._count_ranks(row, attempt)
        if not self.machine and isinstance(row.get("machine"), dict):
            self.machine = row["machine"]
            self.attention_kernels = row.get("attention_kernels") or []
        if is_number(row.get("padding")):
            self._padding = (self._padding[0] + row["padding"], self._padding[1] + 1)
        self.evaluations += reversed(evaluations_in([row]))
        if isinstance(row.get("layer_statistics"), dict):
            self._count_layers(step, row["layer_statistics"])
        for key, points in self.points.items():
            if isinstance(row.get(key), int | float):
                points.add(float(step), float(row[key]))

    def _count_rollout(self, row: Row, attempt: Any) -> None:
        self._rollout.add(row)
        if FIRST_OF_ROLLOUT not in row:
            return
        rollout, self._rollout = self._rollout, RolloutSpeed()
        if rollout.steps > self._rollout_steps:  # what was added before was not complete
            self._rollout_steps = rollout.steps
            self._first_rollouts.clear()
            self._steady_rollouts = {key: array("d") for key in self._steady_rollouts}
        if rollout.steps < self._rollout_steps:
            return
        if (later := self._first_rollouts.get(attempt)) is not None:
            for key, value in later.means.items():
                self._steady_rollouts[key].append(value)
        self._first_rollouts[attempt] = rollout

    def _count_layers(self, step: int, layers: Row) -> None:
        """Keep one in `_layers_each` of the statistics; if too many are kept, every other of them."""
        if self._layers_seen % self._layers_each == 0:
            self.layers.append((step, layers))
        self._layers_seen += 1
        if len(self.layers) > MOST_LAYERS:
            self.layers = self.layers[::2]
            self._layers_each *= 2

    def _count_ranks(self, row: Row, attempt: Any) -> None:
        bytes_by_rank = row.get("memory_bytes_by_rank")
        if not isinstance(bytes_by_rank, list) or not all(map(is_number, bytes_by_rank)):
            return
        if not self.rank_memory:
            self.rank_memory = bytes_by_rank
            self._memory_attempt = attempt
        elif attempt == self._memory_attempt and len(bytes_by_rank) == len(self.rank_memory):
            self.rank_memory = [max(pair) for pair in zip(bytes_by_rank, self.rank_memory, strict=True)]

    def add_evaluations(self, newest_first: Iterable[Row]) -> None:
        """Add the rows of evals.jsonl that no step's row carries, because extra workers made them."""
        carried = {row["step"] for row in self.evaluations}
        beside = [row for row in newest_first if row["step"] not in carried]
        self.beside_seconds = sum(row["seconds"] for row in beside if is_number(row.get("seconds")))
        self.evaluations = sorted([*self.evaluations, *beside], key=lambda row: -int(row["step"]))

    def last_row_before(self, end: int) -> int:
        """Return the time of the last row before `end`, the beginning of a prepare phase, in microseconds; 0 without
        a row.
        """
        return max(
            (self._last_rows[e] for e in self._boundaries[: bisect_right(self._boundaries, end)]), default=0
        )

    @property
    def layouts(self) -> list[str]:
        """Return all layouts, in the order of their first use."""
        return list(reversed(self._layouts))

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Return the steps without a row, as (first, last) of each gap."""
        gaps_at_start = (
            [(self._first, int(self._lowest) - 1)] if self._first < self._lowest < math.inf else []
        )
        return [*gaps_at_start, *reversed(self._gaps)]

    @property
    def padding(self) -> float | None:
        """Return the mean share of padding over the steps that count; None if samples are not packed."""
        total, count = self._padding
        return total / count if count else None

    @property
    def medians(self) -> dict[str, float | None]:
        """Return the medians of MEASURED over the steps that count, without the first of each attempt, which is slower.

        The steps of a rollout count with their mean, see `median_step`, and without the first rollout of each attempt.
        Such a run has the median of UPDATE too.
        """
        import numpy as np

        if self._first_rollouts:
            steady: dict[str, Any] = self._steady_rollouts
            firsts: list[Row] = [rollout.means for rollout in self._first_rollouts.values()]
        else:
            steady = self._steady
            firsts = list(self._first_rows.values())
        if not any(steady.values()):
            steady = {key: [row[key] for row in firsts if is_number(row.get(key))] for key in steady}
        return {key: float(np.median(values)) if len(values) else None for key, values in steady.items()}


def tally(events: Sequence[Row], newest_first: Iterable[Row], first: int = 1) -> RunTotals:
    """Return the totals of these rows."""
    totals = RunTotals(events, first)
    for row in newest_first:
        totals.add(row)
    return totals


def totals_of(run: RunDir) -> RunTotals:
    """Return the totals of the rows in a run directory."""
    first = int((run.read_json(ORIGIN) or {}).get("step", 0)) + 1
    placed = run.log(METRICS).backward()
    totals = tally(run.rows(EVENTS), (line.row for line in placed if line.row is not None), first)
    totals.add_evaluations(run.log(EVALS).newest())
    totals.energy = measured(run.log(NODES).rows())
    return totals


def median_step(rows: Sequence[Row]) -> float:
    """Return the median seconds of these steps; 0 without any.

    The steps of a rollout count with their mean, because the first of them waits for the answers of all.
    """
    firsts = [index for index, row in enumerate(rows) if FIRST_OF_ROLLOUT in row]
    rollouts = [rows[first:after] for first, after in pairwise([*firsts, len(rows)])] or [
        [row] for row in rows
    ]
    steps = max(map(len, rollouts), default=0)  # of a rollout; the last one may not be complete
    means = (
        statistics.mean(row["step_seconds"] for row in rollout)
        for rollout in rollouts
        if len(rollout) == steps
    )
    return statistics.median(means) if rollouts else 0.0


def longest_step(rows: Sequence[Row]) -> float:
    """Return the seconds of the longest of the last attempt's last LONGEST_OF steps; 0 without any."""
    latest = [row for row in rows if row["attempt"] == rows[-1]["attempt"]][-LONGEST_OF:]
    return max((row["step_seconds"] for row in latest), default=0.0)


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST


def never_back(times: Sequence[int], since: int = 0) -> list[int]:
    """Return the times, each raised to the latest of those before it and to `since`, because clocks may be set back."""
    latest = max(times[0], since) if times else 0
    out = []
    for time in times:
        latest = max(latest, time)
        out.append(latest)
    return out


def micros(seconds: Any) -> int:
    """Return seconds as whole microseconds; 0 for an invalid duration."""
    if not is_number(seconds):
        return 0
    return round(min(max(seconds, 0), 1e12) * 1e6)

"""The state of a search: record the results of trials, count them against the limits, and show them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import SECOND, TuneSpec
from orchestrator.tune.trial_records import TrialEnd, TrialRecords, name_of

SHOW_EVERY = 2.0
"""Seconds between two updates of the display while nothing new is reported."""
NOTE_EVERY = 30.0 / 3600
"""Hours of search time between two records of it."""


class SearchProgress:
    """The state of one search, over all commands that continued it.

    Attributes:
        spent: optimizer steps and USD, by run.
    """

    def __init__(
        self,
        tune: TuneSpec | None,
        steps: int,
        sweep: RunDir,
        records: TrialRecords,
        wanted: int,
        hours: float,
        show: Callable[[dict[str, Any]], None],
    ) -> None:
        """Continue from the records of a search.

        Args:
            tune: the search.
            steps: steps of a trial.
            sweep: the directory of the search.
            records: its records.
            wanted: the number of its trials.
            hours: hours that earlier commands took, for records of versions that did not store them.
            show: gets `to_json` when it changes.
        """
        assert tune is not None
        self._tune = tune
        self._steps = steps
        self._tune = tune
        self._steps = steps
        self._sweep = sweep
        self._records = records
        self._wanted = wanted
        self._show = show
        self._hours = max(hours, records.hours)
        """Hours that earlier commands took."""
        self._recorded_hours = self._hours
        """The hours in the last record of them."""
        self._began = time.monotonic()
        """The monotonic time at which this command began."""
        self._launched = time.time()
        """The same in unix seconds."""
        self._shown = 0.0
        """When the display was last updated, unix seconds."""
        self._reported = dict(records.reported)
        """The last result of each run."""
        self._changed = ""
        """Which file of the job has changed since the search began; empty if none has."""
        self._running: set[str] = set()
        """The trials that are being trained."""
        self.spent: dict[str, tuple[int, float]] = {}
        self.recount()
        self._steps_before = self.steps
        """The steps of earlier commands."""
        self._training_since = 0.0
        """When the first step of this command began, unix seconds; 0 before its first result."""
        self._last_result = 0.0
        """When the last new result arrived, unix seconds; 0 before the first."""

    # -- limits

    @property
    def hours(self) -> float:
        """Return the wall-clock hours of all commands together."""
        return self._hours + (time.monotonic() - self._began) / 3600

    @property
    def steps(self) -> int:
        """Return the optimizer steps of all trials."""
        return sum(steps for steps, _ in self.spent.values())

    @property
    def cost(self) -> float:
        """Return the USD of all runs."""
        return float(sum(usd for _, usd in self.spent.values()))

    def recount(self) -> None:
        """Count again from the records and the run directories. The latter also have the steps after the last rung."""
        for result in self._records.reported.values():
            self._spend(result)
        for name in self._records.configs:
            for run in lineage.runs_of(self._sweep, name):
                # A run that cannot be read counts with what it has reported.
                with contextlib.suppress(InputError, OSError):
                    steps, usd = lineage.spent(self._sweep, run)
                    self._spend({"run": run, "own_steps": steps, "cost_usd": usd})

    def _spend(self, result: dict[str, Any]) -> None:
        """Count a run's steps and USD. A repeated result of an earlier rung subtracts nothing."""
        steps, usd = self.spent.get(result["run"], (0, 0.0))
        self.spent[result["run"]] = max(steps, result["own_steps"]), max(usd, result["cost_usd"])

    def limit(self) -> str:
        """Return which limit of the search is reached, or which file of the job has changed, as a sentence; empty if
        none is or has.
        """
        if self._changed:
            return self._changed
        limits = self._tune.limits
        for name, spent, ceiling in (
            ("steps", self.steps, limits.steps),
            ("hours", self.hours, limits.hours),
            ("cost_usd", self.cost, limits.cost_usd),
        ):
            if ceiling is not None and spent >= ceiling:
                return f"tune.limits.{name} {ceiling:g} is reached"
        return ""

    def deadline(self) -> float | None:
        """Return the unix time at which the limit on hours is reached; None without that limit."""
        hours = self._tune.limits.hours
        return None if hours is None else time.time() + (hours - self.hours) * 3600

    # -- what Ray Tune reports

    def on_result(self, result: dict[str, Any]) -> None:
        """Record the result that a trial reports at a rung."""
        self._changed = self._changed or result.get("changed", "")
        self._reported[result["run"]] = result
        self._spend(result)
        if self.steps > self._steps_before:
            self._last_result = time.time()
            self._training_since = self._training_since or self._first_step(result["run"])
        if result["trial"] not in self._records.ended:
            steps, usd = self.spent[result["run"]]
            self._records.report({**result, "own_steps": steps, "cost_usd": usd}, self.hours)
        self.show()

    def on_end(self, trial: str, result: dict[str, Any] | None) -> None:
        """Record the end of a trial. `result` is its last result, None if its process died."""
        run = lineage.runs_of(self._sweep, trial)[-1]
        if result is None:
            steps, usd = lineage.spent(self._sweep, run)
            self._spend({"run": run, "own_steps": steps, "cost_usd": usd})
        if result is None or result["failed"]:
            reason = result["failed"] if result else "its process died, and died again after a restart"
            step = self._reported.get(run, {}).get("step", 0)
            self._records.end(trial, TrialEnd("failed", run, step, None, reason))
        elif not result["limited"] and (result["finished"] or not self.limit()):
            full = result["finished"]
            state = "done" if full else "stopped"
            reason = "" if full else result.get("ended") or f"stopped by {self._tune.scheduler}"
            value = result["value"] if math.isfinite(result["value"]) else None
            second = result.get(SECOND)
            second = second if second is not None and math.isfinite(second) else None
            end = TrialEnd(state, result["run"], result["step"], value, reason, second=second)
            self._records.end(trial, end)
        self.show()

    def show(self) -> None:
        """Update the display."""
        self._shown = time.time()
        self._show(self.to_json())

    def tick(self, running: set[str]) -> None:
        """Update the display and record the hours, each if it is due. Call it after every step of Tune's loop.

        `running` are the trials that are being trained.
        """
        self._running = running
        if self.hours - self._recorded_hours > NOTE_EVERY:
            self._recorded_hours = self.hours
            self._records.record_hours(self.hours)
        if time.time() - self._shown > SHOW_EVERY:
            self.show()

    def to_json(self) -> dict[str, Any]:
        """Return what the display shows. `eta_seconds` is an upper bound: it assumes that no more trials stop early."""
        return {
            "trials": self._wanted,
            "ended": len(self._records.ended),
            "failed": sum(e.state == "failed" for e in self._records.ended.values()),
            # A trial that ended under an earlier command runs briefly to report its results again.
            "running": sorted(self._running - self._records.ended.keys()),
            "steps": self.steps,
            "best": self.best(),
            "eta_seconds": self._eta(),
            "note": "",
        }

    def _eta(self) -> float | None:
        """Return the seconds until the last trial has ended, None before the first result of this command.

        The pace is taken from the first step to the last result, because the preparation before the first step happens
        only once.
        """
        if not self._training_since:
            return None
        new = self.steps - self._steps_before
        left = sum(self._steps_left(name) for name in self._names())
        pace = max(self._last_result - self._training_since, 0.0) / new
        return max(pace * left - (time.time() - self._last_result), 0.0) if left else 0.0

    def _first_step(self, run: str) -> float:
        """Return the unix time at which the first step of a run under this command began."""
        rows = lineage.at(self._sweep, run).log(METRICS).rows()
        began = (row["time"] - row["step_seconds"] for row in rows if row["time"] >= self._launched)
        return next(began, self._launched)

    def best(self) -> dict[str, Any] | None:
        """Return the best trial so far as {trial, run, step, value}; None before the first result.

        A trial that failed does not count, however good it was at a rung, because its job does not reach its end.
        """
        results = [
            {"trial": r["trial"], "run": r["run"], "step": r["step"], "value": r["value"]}
            for r in self._reported.values()
        ]
        results += [
            {"trial": name, "run": e.run, "step": e.step, "value": e.value}
            for name, e in self._records.ended.items()
        ]
        failed = {name for name, end in self._records.ended.items() if end.state == "failed"}
        results = [r for r in results if r["value"] is not None and math.isfinite(r["value"])]
        results = [r for r in results if r["trial"] not in failed]
        sign = 1 if self._tune.direction == "min" else -1
        # Only the last result of a trial counts. Among equal values, the longer training wins.
        last = {r["trial"]: r for r in sorted(results, key=lambda r: r["step"])}
        return min(last.values(), key=lambda r: (sign * r["value"], -r["step"]), default=None)

    def _names(self) -> list[str]:
        return [name_of(number) for number in range(self._wanted)]

    def _steps_left(self, trial: str) -> int:
        if trial in self._records.ended:
            return 0
        reached = max((r["step"] for r in self._reported.values() if r["trial"] == trial), default=0)
        return self._steps - int(reached)

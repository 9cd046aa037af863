"""The state of a search: results of trials are recorded, counted against the limits and shown."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.trial_records import TrialEnd, TrialRecords, name_of

SHOW_EVERY = 2.0
"""Seconds between two updates of the display while nothing new is reported."""
NOTE_EVERY = 30.0 / 3600
"""Hours of search time between two records of it."""


class SearchProgress:
    """The state of one search over all commands that continued it.

    `hours` is what earlier commands took, for records of a version that did not write it down.
    """

    def __init__(
        self,
        spec: JobSpec,
        sweep: RunDir,
        records: TrialRecords,
        wanted: int,
        hours: float,
        show: Callable[[dict[str, Any]], None],
    ) -> None:
        assert spec.tune is not None
        self._spec, self._tune, self._sweep, self._records = spec, spec.tune, sweep, records
        self._wanted, self._hours, self._show = wanted, max(hours, records.hours), show
        self._began, self._shown, self._recorded_hours = time.monotonic(), 0.0, self._hours
        self._reported = dict(records.reported)
        self._running: set[str] = set()
        self.spent: dict[str, tuple[int, float]] = {}
        """Optimiser steps and USD by run."""
        self.recount()
        self._steps_before = self.steps
        self._launched = time.time()
        self._training_since = self._last_result = (
            0.0  # unix seconds, 0 before the first result of this command
        )

    # -- limits

    @property
    def hours(self) -> float:
        """Wall-clock hours, all commands together."""
        return self._hours + (time.monotonic() - self._began) / 3600

    @property
    def steps(self) -> int:
        """Optimiser steps of all trials."""
        return sum(steps for steps, _ in self.spent.values())

    @property
    def cost(self) -> float:
        """USD of all runs."""
        return float(sum(usd for _, usd in self.spent.values()))

    def recount(self) -> None:
        """Count again from the records and the run directories, which also know of steps after the last rung."""
        for result in self._records.reported.values():
            self._spend(result)
        for name in self._records.configs:
            for run in lineage.runs_of(self._sweep, name):
                with contextlib.suppress(
                    InputError, OSError
                ):  # one that cannot be read has spent what it told
                    steps, usd = lineage.spent(self._sweep, run)
                    self._spend({"run": run, "own_steps": steps, "cost_usd": usd})

    def _spend(self, result: dict[str, Any]) -> None:
        """Count a run's steps and USD. A result reported again, of an earlier rung, subtracts nothing."""
        steps, usd = self.spent.get(result["run"], (0, 0.0))
        self.spent[result["run"]] = max(steps, result["own_steps"]), max(usd, result["cost_usd"])

    def limit(self) -> str:
        """Which limit of the search is reached, as a sentence; empty if none is."""
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
        """When the limit on hours is reached, in unix seconds; None without that limit."""
        hours = self._tune.limits.hours
        return None if hours is None else time.time() + (hours - self.hours) * 3600

    # -- what Ray Tune reports

    def on_result(self, result: dict[str, Any]) -> None:
        """A trial has reported its result at a rung."""
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
        """A trial has ended; `result` is its last one, None if its process died."""
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
            self._records.end(trial, TrialEnd(state, result["run"], result["step"], value, reason))
        self.show()

    def show(self) -> None:
        """Update the display."""
        self._shown = time.time()
        self._show(self.to_json())

    def tick(self, running: set[str]) -> None:
        """Update the display and record the hours, each if it is due. Called after every step of Tune's loop, with the
        trials that are being trained."""
        self._running = running
        if self.hours - self._recorded_hours > NOTE_EVERY:
            self._recorded_hours = self.hours
            self._records.record_hours(self.hours)
        if time.time() - self._shown > SHOW_EVERY:
            self.show()

    def to_json(self) -> dict[str, Any]:
        """What the display shows. `eta_seconds` is an upper bound: as if no further trial were stopped early."""
        return {
            "trials": self._wanted,
            "ended": len(self._records.ended),
            "failed": sum(e.state == "failed" for e in self._records.ended.values()),
            # One that has ended reports again what it had reported.
            "running": sorted(self._running - self._records.ended.keys()),
            "steps": self.steps,
            "best": self.best(),
            "eta_seconds": self._eta(),
            "note": "",
        }

    def _eta(self) -> float | None:
        """Seconds until the last trial has ended, at the pace from the first step of this command to its last result:
        what came before the first step comes once. None before there is one."""
        if not self._training_since:
            return None
        new = self.steps - self._steps_before
        left = sum(self._steps_left(name) for name in self._names())
        pace = max(self._last_result - self._training_since, 0.0) / new
        return max(pace * left - (time.time() - self._last_result), 0.0) if left else 0.0

    def _first_step(self, run: str) -> float:
        """When the first step of a run began that was computed since this command was given, unix seconds."""
        rows = lineage.at(self._sweep, run).log(METRICS).rows()
        began = (row["time"] - row["step_seconds"] for row in rows if row["time"] >= self._launched)
        return next(began, self._launched)

    def best(self) -> dict[str, Any] | None:
        """The best trial so far: {trial, run, step, value}; None before the first result. One that has failed later is
        none, whatever it was at a rung: its job does not come to its end."""
        found = [
            {"trial": r["trial"], "run": r["run"], "step": r["step"], "value": r["value"]}
            for r in self._reported.values()
        ]
        found += [
            {"trial": name, "run": e.run, "step": e.step, "value": e.value}
            for name, e in self._records.ended.items()
        ]
        failed = {name for name, end in self._records.ended.items() if end.state == "failed"}
        found = [f for f in found if f["value"] is not None and math.isfinite(f["value"])]
        found = [f for f in found if f["trial"] not in failed]
        sign = 1 if self._tune.direction == "min" else -1
        # Of a trial's runs only the last one counts, and of equal values the longer training.
        last = {f["trial"]: f for f in sorted(found, key=lambda f: f["step"])}
        return min(last.values(), key=lambda f: (sign * f["value"], -f["step"]), default=None)

    def _names(self) -> list[str]:
        return [name_of(number) for number in range(self._wanted)]

    def _steps_left(self, trial: str) -> int:
        if trial in self._records.ended:
            return 0
        reached = max((r["step"] for r in self._reported.values() if r["trial"] == trial), default=0)
        return self._spec.train.steps - int(reached)

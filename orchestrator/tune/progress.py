"""Where a search stands: what Tune tells of its trials is written down, counted against the limits, and shown."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from orchestrator.job.spec import JobSpec
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.trial_records import TrialEnd, TrialRecords, name_of

SHOW_EVERY = 2.0
"""Seconds between two times that a search which has no news is shown."""
NOTE_EVERY = 30.0 / 3600
"""Hours after which it is written down how many the search has taken."""


class SearchProgress:
    """The state of one search, from all its commands. `hours` is what earlier ones took, if the ledger does not say."""

    def __init__(
        self,
        spec: JobSpec,
        sweep: RunDir,
        ledger: TrialRecords,
        wanted: int,
        hours: float,
        show: Callable[[dict[str, Any]], None],
    ) -> None:
        assert spec.tune is not None
        self._spec, self._tune, self._sweep, self._ledger = spec, spec.tune, sweep, ledger
        self._wanted, self._hours, self._show = wanted, max(hours, ledger.hours), show
        self._began, self._shown, self._noted = time.monotonic(), 0.0, self._hours
        self._told = dict(ledger.told)
        self._at_work: set[str] = set()
        self.spent: dict[str, tuple[int, float]] = {}
        """Optimiser steps and USD by run."""
        self.recount()
        self._steps_before = self.steps

    # -- limits

    @property
    def hours(self) -> float:
        """Of the clock, all commands together."""
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
        """Count what is on record, of earlier commands and of rungs that were not reached too."""
        for result in self._ledger.told.values():
            self._spend(result)
        for name in self._ledger.configs:
            for run in lineage.runs_of(self._sweep, name):
                steps, usd = lineage.spent(self._sweep, run)
                self._spend({"run": run, "own_steps": steps, "cost_usd": usd})

    def _spend(self, result: dict[str, Any]) -> None:
        """A run has spent so much. What it tells again, of an earlier rung, takes nothing back."""
        steps, usd = self.spent.get(result["run"], (0, 0.0))
        self.spent[result["run"]] = max(steps, result["own_steps"]), max(usd, result["cost_usd"])

    def limit(self) -> str:
        """The ceiling that is reached, empty if none is."""
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
        """When the hours are over, unix seconds."""
        hours = self._tune.limits.hours
        return None if hours is None else time.time() + (hours - self.hours) * 3600

    # -- what Tune tells

    def heard(self, result: dict[str, Any]) -> None:
        """A trial has come to a rung."""
        self._told[result["run"]] = result
        self._spend(result)
        if result["trial"] not in self._ledger.ended:
            steps, usd = self.spent[result["run"]]
            self._ledger.tell({**result, "own_steps": steps, "cost_usd": usd}, self.hours)
            self._at_work.add(result["trial"])
        self.show()

    def ended(self, trial: str, result: dict[str, Any] | None) -> None:
        """A trial is over; `result` is its last one, None if it failed."""
        self._at_work.discard(trial)
        run = lineage.runs_of(self._sweep, trial)[-1]
        if result is None:
            steps, usd = lineage.spent(self._sweep, run)
            self._spend({"run": run, "own_steps": steps, "cost_usd": usd})
        if result is None or result["failed"]:
            reason = (
                result["failed"] if result else "its process died, and died again when it was started anew"
            )
            step = self._told.get(run, {}).get("step", 0)
            self._ledger.end(trial, TrialEnd("failed", run, step, None, reason))
        elif not result["limited"] and (result["finished"] or not self.limit()):
            full = result["finished"]
            state = "done" if full else "stopped"
            reason = "" if full else f"stopped by {self._tune.scheduler}"
            self._ledger.end(trial, TrialEnd(state, result["run"], result["step"], result["value"], reason))
        self.show()

    def show(self) -> None:
        """Tell the user."""
        self._shown = time.time()
        self._show(self.to_json())

    def tick(self) -> None:
        """Show again if it is time, and write the hours down."""
        if self.hours - self._noted > NOTE_EVERY:
            self._noted = self.hours
            self._ledger.pass_time(self.hours)
        if time.time() - self._shown > SHOW_EVERY:
            self.show()

    def to_json(self) -> dict[str, Any]:
        """What is shown. `eta_seconds` is a bound: as if nothing more were stopped early."""
        best = self.best()
        steps, seconds = self.steps, time.monotonic() - self._began
        left = sum(self._steps_left(name) for name in self._names())
        new = steps - self._steps_before
        return {
            "trials": self._wanted,
            "ended": len(self._ledger.ended),
            "failed": sum(e.state == "failed" for e in self._ledger.ended.values()),
            "at_work": sorted(self._at_work),
            "steps": steps,
            "best": best,
            "eta_seconds": seconds / new * left if new else None,
            "note": "",
        }

    def best(self) -> dict[str, Any] | None:
        """The best trial so far: {trial, run, step, value}."""
        found = [
            {"trial": r["trial"], "run": r["run"], "step": r["step"], "value": r["value"]}
            for r in self._told.values()
        ]
        found += [
            {"trial": name, "run": e.run, "step": e.step, "value": e.value}
            for name, e in self._ledger.ended.items()
        ]
        found = [f for f in found if f["value"] is not None and math.isfinite(f["value"])]
        sign = 1 if self._tune.mode == "min" else -1
        # Of a trial's runs only the last one counts, and of equal values the longer training.
        last = {f["trial"]: f for f in sorted(found, key=lambda f: f["step"])}
        return min(last.values(), key=lambda f: (sign * f["value"], -f["step"]), default=None)

    def _names(self) -> list[str]:
        return [name_of(number) for number in range(self._wanted)]

    def _steps_left(self, trial: str) -> int:
        if trial in self._ledger.ended:
            return 0
        reached = max((r["step"] for r in self._told.values() if r["trial"] == trial), default=0)
        return self._spec.train.steps - int(reached)

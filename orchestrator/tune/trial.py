"""A trial inside Ray Tune: a run of its own, driven by the same controller from one rung to the next.

Between two rungs nothing runs, so no step is computed that the scheduler did not ask for; what the ranks run in
stays, with all imports done, for the next rung and for the next trial in this process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from ray import tune as ray_tune

from cluster.workers.gang import Gang
from cluster.workers.on_ray import on_ray
from orchestrator.checkpoint.identity import job_in
from orchestrator.checkpoint.store import Store
from orchestrator.control.controller import Controller
from orchestrator.job.errors import InputError
from orchestrator.job.overrides import put
from orchestrator.job.spec import JobSpec, parse
from orchestrator.job.tune import POPULATION
from orchestrator.resolve.parts import data_cache
from orchestrator.storage.run_directory import RunDir
from orchestrator.track.summary import summary
from orchestrator.track.totals import counted
from orchestrator.tune import lineage
from orchestrator.tune.rungs import interval_of, rungs
from orchestrator.tune.space import job_of

FAILED = "failed.json"
COMMIT = "commit.json"
STEP, VALUE = "step", "value"
"""Keys of a result that schedulers decide by: Tune's own count of results begins anew with every restore."""


class RunFailed(RuntimeError):
    """The run of a trial failed; the text says why."""


class Trial(ray_tune.Trainable):
    """Tune's trial. Its config is {sweep, trial, params, ended, deadline}.

    `ended` is the step that the trial had ended at before this command: it then tells again what it told, so that
    scheduler and sampler know it, and trains nothing. `deadline` (unix seconds or None) is when the sweep ends.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """See Ray."""
        self._gang = ReusedGang(on_ray().gang())
        self._begin(config["given"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial in this process."""
        self._begin(new_config["given"])
        return True

    def _begin(self, given: dict[str, Any]) -> None:
        self._given, self._trial = given, given["trial"]
        self._sweep = RunDir(given["sweep"])
        base = job_in(self._sweep)
        assert base is not None
        assert base.tune is not None
        self._base, self._tune = base, base.tune
        self._name = lineage.runs_of(self._sweep, self._trial)[-1]
        self._at = self._first() if base.tune.scheduler in POPULATION else 0

    def _first(self) -> int:
        """The rung before the last one reached: PBT, taken up again, must not judge by results of long ago."""
        committed = _committed(lineage.at(self._sweep, self._name))
        reached = [step for step in rungs(self._tune, self._base.train.steps) if step <= committed]
        return reached[-2] if len(reached) > 1 else 0

    def step(self) -> dict[str, Any]:
        """Train to the next rung. A run that fails is a result too: Tune would start all anew for an exception."""
        run = lineage.at(self._sweep, self._name)
        try:
            spec = self._job()
            every = rungs(self._tune, spec.train.steps)
            rung = reached = next((step for step in every if step > self._at), every[-1])
            if (reason := run.told(FAILED).get("reason")) is not None:
                return self._failed(str(reason))
            if self._given["ended"] is None and _committed(run) < rung:
                reached = self._drive(spec, run, rung)
            return self._result(spec, run, rung, reached)
        except InputError as error:
            reason = str(error)
        except RunFailed as error:
            reason = str(error)
        run.create()
        run.write_json(FAILED, {"reason": reason})
        return self._failed(reason)

    def _job(self) -> JobSpec:
        """The job of the run: the values of the trial put in, and no more that a trial does not need."""
        spec = job_of(
            self._base,
            self._given["params"],
            name=f"{self._base.name[:50]}-{self._name}",
            checkpoint__export=None,
            data__cache=data_cache(self._base, self._sweep),
        )
        if self._tune.scheduler in POPULATION:
            # An exploit may come when the donor is two decisions further.
            kept = 1 + 3 * math.ceil(interval_of(self._tune, spec.train.steps) / spec.checkpoint.every)
            checkpoint = spec.checkpoint.model_copy(update={"keep": max(kept, spec.checkpoint.keep)})
            spec = spec.model_copy(update={"checkpoint": checkpoint})
        return spec

    def _drive(self, spec: JobSpec, run: RunDir, rung: int) -> int:
        """Train to the rung, or to where a limit ends it; the step reached. Raises RunFailed."""
        document = spec.model_dump(mode="json")
        for promotion in self._tune.promote:
            if promotion.at <= self._at:
                for key, value in promotion.set.items():
                    put(document, key, value, "tune.promote")
        if (deadline := self._given["deadline"]) is not None:
            left = max(deadline - time.time(), 1.0) / 3600
            document["limits"]["hours"] = min(self._hours(spec, run) + left, spec.limits.hours or math.inf)
        spec = parse(document, self._name)
        run.create()
        cluster = dataclasses.replace(on_ray(), gang=lambda: self._gang)
        with run.lock():
            found = Controller(spec, run, rung, cluster).drive()
        if found["state"] == "failed":
            raise RunFailed(found["reason"] or "the run failed")
        return int(found["commit"] or 0)

    def _hours(self, spec: JobSpec, run: RunDir) -> float:
        """What the run has taken so far, as its own limit counts it."""
        found = summary(spec, None, run.rows("events.jsonl"), counted(run))["ledger"]
        return float(found["wall_seconds"] - found["seconds"].get("down", 0.0)) / 3600

    def _result(self, spec: JobSpec, run: RunDir, rung: int, reached: int) -> dict[str, Any]:
        """What the scheduler decides by, from the rows up to the rung."""
        ended = self._given["ended"]
        # Early on a long window is of how fast a loss came down, more than of where it is.
        window = min(self._tune.window, max(rung // 4, 1))
        recent = lineage.latest(self._sweep, self._name, rung, window)
        if not recent or self._tune.metric not in recent[-1]:
            known = (
                ", ".join(sorted(k for k, v in recent[-1].items() if isinstance(v, float))) if recent else ""
            )
            raise InputError(f"no row has the metric {self._tune.metric!r}", "tune.metric", f"known: {known}")
        self._at = rung
        done = rung >= spec.train.steps or reached < rung or (ended is not None and rung >= ended)
        return {
            STEP: min(rung, reached),
            VALUE: statistics.fmean(float(row[self._tune.metric]) for row in recent),
            "failed": "",
            "trial": self._trial,
            "run": self._name,
            "own_steps": lineage.own_steps(self._sweep, self._name, min(rung, reached)),
            "cost_usd": run.told("summary.json").get("cost_usd") or 0.0,
            "limited": reached < rung,
            "finished": rung >= spec.train.steps,  # Tune sets "done" where its scheduler stops a trial
            "done": done,
        }

    def _failed(self, reason: str) -> dict[str, Any]:
        """A result that no scheduler prefers to another; what the trial has spent until then, it has spent."""
        steps, usd = lineage.spent(self._sweep, self._name)
        worst = math.inf if self._tune.mode == "min" else -math.inf
        told = {STEP: self._at, VALUE: worst, "failed": reason, "trial": self._trial, "run": self._name}
        return told | {"own_steps": steps, "cost_usd": usd, "limited": False, "finished": False, "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Name the commit that the last result is of. The weights stay where they are."""
        told = {"run": self._name, "step": self._at}
        (Path(checkpoint_dir) / COMMIT).write_text(json.dumps(told))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on: with the own run after a pause, in a new one after an exploit."""
        told = json.loads((Path(checkpoint) / COMMIT).read_text())
        if lineage.trial_of(told["run"]) != self._trial:
            params = self._given["params"]
            self._name = lineage.exploit(self._sweep, self._trial, told["run"], told["step"], params)
            begun = lineage.origin(self._sweep, self._name)
            assert begun is not None
            self._at = begun["step"]
        else:
            self._at = told["step"]

    def cleanup(self) -> None:
        """End what the ranks ran in."""
        self._gang.really_close()


class ReusedGang:
    """A gang that stays open when its run ends, for the next one."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gang, name)

    def close(self) -> None:
        """End the ranks, and keep what they ran in."""
        self._gang.stop()

    def really_close(self) -> None:
        """See `Gang.close`."""
        self._gang.close()


def _committed(run: RunDir) -> int:
    """The last commit of a run, 0 if there is none."""
    return max(Store(run.at("checkpoints")).steps(), default=0)

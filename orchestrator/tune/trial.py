"""A trial inside Ray Tune: a separate run, which the ordinary controller drives from one rung to the next.

No rank runs between two rungs, so no step is computed that the scheduler did not ask for. Workers with all imports done
are kept for the next rung and for the next trial in this process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune as ray_tune

from cluster.workers.gang import Gang
from cluster.workers.on_ray import on_ray
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import InputError
from orchestrator.config.overrides import set_key
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.controller import Controller
from orchestrator.resolve.commit_model import as_begun
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import POPULATION, SECOND
from orchestrator.tune.rung_steps import longest_warmup, rungs
from orchestrator.tune.same_inputs import InputsChanged, check_same_inputs
from orchestrator.tune.trial_job import job_of_trial
from orchestrator.tune.trial_values import hours_of, value_of

FAILED = "failed.json"
"""The file of a run that failed, with its reason."""
COMMIT = "commit.json"
"""The file of Tune's checkpoint, which names a commit."""
STEP = "step"
"""The key of a result's step. Schedulers decide by it, because Tune's own count restarts with every restore."""
VALUE = "value"
"""The key of a result's metric."""


class RunFailed(RuntimeError):
    """The run of a trial failed. The message says why."""


class Trial(ray_tune.Trainable):
    """Tune's trial. Its config has one key, "assignment": {sweep, trial, params, ended, deadline}.

    - `sweep`: the URI of the search's directory.
    - `params`: the values of the trial, by key.
    - `ended`: the step at which the trial ended under an earlier command, None if it did not. Such a trial trains
      nothing. It reports its recorded results again for the scheduler and the sampler.
    - `deadline`: the unix time at which the search must end, or None.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """See Ray."""
        self._gang = ReusedGang(on_ray().gang())
        self._begin(config["assignment"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """See Ray. The process continues with another trial."""
        self._begin(new_config["assignment"])
        return True

    def _begin(self, assignment: dict[str, Any]) -> None:
        self._assignment = assignment
        self._trial = assignment["trial"]
        self._sweep = RunDir(assignment["sweep"])
        base = read_job(self._sweep)
        assert base is not None
        assert base.tune is not None
        self._base = base
        self._tune = base.tune
        self._warmup = longest_warmup(base.tune, base.train)
        self._name = lineage.runs_of(self._sweep, self._trial)[-1]
        self._at = self._first() if base.tune.scheduler in POPULATION else 0

    def _first(self) -> int:
        """Return the rung before the last one that was reached, so that a continued PBT does not
        compare old results.
        """
        committed = _committed(lineage.at(self._sweep, self._name))
        reached = [
            step for step in rungs(self._tune, self._base.train.steps, self._warmup) if step <= committed
        ]
        return reached[-2] if len(reached) > 1 else 0

    def step(self) -> dict[str, Any]:
        """Train to the next rung. A failed run returns a result, since Tune restarts a trial that raises."""
        run = lineage.at(self._sweep, self._name)
        try:
            spec = job_of_trial(self._base, self._sweep, self._name, self._assignment["params"])
            every = rungs(self._tune, spec.train.steps, self._warmup)
            rung = reached = next((step for step in every if step > self._at), every[-1])
            limited = False
            ended = ""
            if (reason := run.read_json_or_empty(FAILED).get("reason")) is not None:
                return self._failed(str(reason))
            if self._assignment["ended"] is None and _committed(run) < rung:
                reached, ended, limited = self._drive(spec, run, rung)
            return self._result(
                spec.train.steps,
                run,
                evaluations_every=spec.evaluate.every if spec.evaluate else None,
                rung=rung,
                reached=reached,
                limited=limited,
                why=ended,
            )
        except InputsChanged as error:
            return self._begun_otherwise(str(error))
        except InputError as error:
            reason = str(error)
        except RunFailed as error:
            reason = str(error)
        run.create()
        run.write_json(FAILED, {"reason": reason})
        return self._failed(reason)

    def _drive(self, spec: JobSpec, run: RunDir, rung: int) -> tuple[int, str, bool]:
        """Train to the rung, or until a limit is reached or the run ends.

        Returns the step reached, why it ended there, and whether the search's limit on hours ended it. Raises
        RunFailed.
        """
        document = spec.model_dump(mode="json")
        for promotion in self._tune.promote:
            if promotion.at <= self._at:
                for key, value in promotion.set.items():
                    set_key(document, key, value, "tune.promote")
        hours = math.inf  # of the search
        if (deadline := self._assignment["deadline"]) is not None:
            hours = hours_of(spec.summarised, run) + max(deadline - time.time(), 1.0) / 3600
            document["limits"]["hours"] = min(hours, spec.limits.hours or math.inf)
        spec = parse(document, self._name)
        run.create()
        cluster = dataclasses.replace(on_ray(), gang=lambda: self._gang)
        with run.lock():
            commit = Store(run.commits).latest(deep=False)
            job = spec.with_parts(workload=as_begun(spec.workload, commit))
            same = partial(
                check_same_inputs,
                self._sweep,
                identity=job.run_identity,
                workload=job.workload,
                data=job.data,
                values=self._assignment["params"],
            )
            result = Controller(
                job, run, rung, cluster, until_reason="a rung of the search", check_data=same
            ).drive()
        if result["state"] == "failed":
            raise RunFailed(result["reason"] or "the run failed")
        reached = int(result["commit"] or 0)
        limited = (
            reached < rung
            and hours <= (spec.limits.hours or math.inf)
            and hours_of(spec.summarised, run) >= hours
        )
        return reached, str(result["reason"] or ""), limited

    def _result(
        self,
        steps: int,
        run: RunDir,
        *,
        evaluations_every: int | None,
        rung: int,
        reached: int,
        limited: bool,
        why: str,
    ) -> dict[str, Any]:
        """Return the result that the scheduler decides by, from the rows up to the rung of a run of `steps` steps.

        If `limited`, the search's limit on hours ended the run, and the next command continues it. Otherwise a run that
        ended before the rung has ended for good, and `why` is the reason.
        """
        ended = self._assignment["ended"]
        try:
            values = self._values(rung, evaluations_every)
        except InputError:
            if not limited:
                raise
            values = self._worst
        self._at = rung
        done = rung >= steps or reached < rung or (ended is not None and rung >= ended)
        return {
            STEP: min(rung, reached),
            VALUE: values[0],
            SECOND: values[1] if len(values) > 1 else None,
            "failed": "",
            "trial": self._trial,
            "run": self._name,
            "own_steps": lineage.own_steps(self._sweep, self._name, min(rung, reached)),
            "cost_usd": run.read_json_or_empty("summary.json").get("cost_usd") or 0.0,
            "limited": limited,
            "ended": why if reached < rung and not limited else "",
            "finished": rung >= steps,  # Tune sets "done" where its scheduler stops a trial
            "done": done,
        }

    def _values(self, rung: int, evaluations_every: int | None) -> list[float]:
        """Return the value of each of the search's metrics at a rung. Raises InputError."""
        values = [
            value_of(
                metric,
                self._tune.window,
                self._sweep,
                self._name,
                rung=rung,
                evaluations_every=evaluations_every,
            )
            for metric in self._tune.metrics
        ]
        return [
            worst if math.isnan(value) else value for value, worst in zip(values, self._worst, strict=True)
        ]

    def _failed(self, reason: str) -> dict[str, Any]:
        """Return the result of a failed trial: the worst possible value, and the steps and USD that it used."""
        steps, usd = lineage.spent(self._sweep, self._name)
        result = {
            STEP: self._at,
            VALUE: self._worst[0],
            SECOND: None,
            "failed": reason,
            "trial": self._trial,
            "run": self._name,
        }
        return result | {
            "own_steps": steps,
            "cost_usd": usd,
            "limited": False,
            "ended": "",
            "finished": False,
            "done": True,
        }

    def _begun_otherwise(self, reason: str) -> dict[str, Any]:
        """Return the result of a trial that did not start because a file that the job names has changed. It ends the
        search, and the next command continues the trial.
        """
        return self._failed("") | {"limited": True, "changed": reason}

    @property
    def _worst(self) -> list[float]:
        """Return the values of a trial that failed or diverged. Infinite, because schedulers cannot order NaN."""
        return [math.inf if direction == "min" else -math.inf for direction in self._tune.directions]

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write which commit the last result belongs to. The weights stay where they are."""
        commit = {"run": self._name, "step": self._at}
        (Path(checkpoint_dir) / COMMIT).write_text(json.dumps(commit))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue the same run after a pause, or a new run from the donor's commit after an exploit."""
        commit = json.loads((Path(checkpoint) / COMMIT).read_text())
        if lineage.trial_of(commit["run"]) != self._trial:
            params = self._assignment["params"]
            self._name = lineage.exploit(self._sweep, self._trial, commit["run"], commit["step"], params)
            begun = lineage.origin(self._sweep, self._name)
            assert begun is not None
            self._at = begun["step"]
        else:
            self._at = commit["step"]

    def cleanup(self) -> None:
        """See Ray. Close the gang with its worker processes."""
        self._gang.shut_down()


class ReusedGang:
    """A gang whose workers stay for the next run."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gang, name)

    def close(self) -> None:
        """Stop the ranks, and keep the workers."""
        self._gang.stop()

    def shut_down(self) -> None:
        """See `Gang.close`."""
        self._gang.close()


def _committed(run: RunDir) -> int:
    """Return the step of the run's last commit, 0 before the first."""
    return max(Store(run.commits).steps(), default=0)

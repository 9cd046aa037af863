"""A trial inside Ray Tune: a separate run, which the ordinary controller drives from one rung to the next.

No rank runs between two rungs, so no step is computed that the scheduler did not ask for. Workers with all imports done
are kept for the next rung and for the next trial in this process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune as ray_tune

from cluster.workers.gang import Gang
from cluster.workers.on_ray import on_ray
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import InputError
from orchestrator.config.overrides import set_key
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.controller import Controller
from orchestrator.evaluate.config import EvaluateSpec, without_tasks
from orchestrator.observe.config import SummarisedJob
from orchestrator.observe.formatting import run_name, trial_name
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import totals_of
from orchestrator.resolve.commit_model import as_begun
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.storage.row_line import evaluations_in
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import POPULATION
from orchestrator.tune.rungs import interval_of, longest_warmup, rungs
from orchestrator.tune.same_inputs import InputsChanged, check_same_inputs
from orchestrator.tune.space import job_of

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
            spec = self._job()
            every = rungs(self._tune, spec.train.steps, self._warmup)
            rung = reached = next((step for step in every if step > self._at), every[-1])
            limited = False
            ended = ""
            if (reason := run.read_json_or_empty(FAILED).get("reason")) is not None:
                return self._failed(str(reason))
            if self._assignment["ended"] is None and _committed(run) < rung:
                reached, ended, limited = self._drive(spec, run, rung)
            return self._result(
                spec.evaluate, spec.train.steps, run, rung=rung, reached=reached, limited=limited, why=ended
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

    def _job(self) -> JobSpec:
        """Return the job of the run, with the values of the trial and without exports and tasks.

        It has an evaluation at each rung if the metric is one of an evaluation.
        """
        base = self._base
        evaluate = without_tasks(base.evaluate, base.set_names)
        unregistered = {"tracking__register_as": None} if base.tracking else {}
        spec = job_of(
            base.model_copy(update={"evaluate": evaluate, "notify": None}),
            self._assignment["params"],
            name=trial_name(run_name(base.name, self._sweep.name), self._name),
            **{f"checkpoint__{key}": value for key, value in NO_EXPORT.items()},
            data__cache=data_cache(self._base.data, self._sweep),
            **unregistered,
        )
        if spec.evaluate is not None and "." in self._tune.metric:
            at = sorted({*spec.evaluate.at, *rungs(self._tune, spec.train.steps, self._warmup)})
            spec = spec.model_copy(update={"evaluate": spec.evaluate.model_copy(update={"at": at})})
        if self._tune.scheduler in POPULATION:
            # When another trial takes over a commit, this trial may be two decisions ahead of it.
            kept = 1 + 3 * math.ceil(interval_of(self._tune, spec.train.steps) / spec.checkpoint.every)
            checkpoint = spec.checkpoint.model_copy(update={"keep": max(kept, spec.checkpoint.keep)})
            spec = spec.model_copy(update={"checkpoint": checkpoint})
        return spec

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
            hours = self._hours(spec.summarised, run) + max(deadline - time.time(), 1.0) / 3600
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
            found = Controller(
                job, run, rung, cluster, until_reason="a rung of the search", check_data=same
            ).drive()
        if found["state"] == "failed":
            raise RunFailed(found["reason"] or "the run failed")
        reached = int(found["commit"] or 0)
        limited = (
            reached < rung
            and hours <= (spec.limits.hours or math.inf)
            and self._hours(spec.summarised, run) >= hours
        )
        return reached, str(found["reason"] or ""), limited

    def _hours(self, job: SummarisedJob, run: RunDir) -> float:
        """Return the hours of the run so far, counted like `limits.hours`."""
        found = summary(job, None, run.rows("events.jsonl"), totals_of(run))["ledger"]
        return float(found["wall_seconds"] - found["seconds"].get("down", 0.0)) / 3600

    def _result(
        self,
        evaluate: EvaluateSpec | None,
        steps: int,
        run: RunDir,
        *,
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
            value = self._evaluated(evaluate, rung) if "." in self._tune.metric else self._trained(rung)
        except InputError:
            if not limited:
                raise
            value = math.nan
        self._at = rung
        done = rung >= steps or reached < rung or (ended is not None and rung >= ended)
        return {
            STEP: min(rung, reached),
            VALUE: self._worst if math.isnan(value) else value,
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

    def _trained(self, rung: int) -> float:
        """Return the mean of the metric over the last steps."""
        # Early in training a mean over many steps would measure how fast the loss fell, not its level.
        window = min(self._tune.window, max(rung // 4, 1))
        recent = lineage.latest(self._sweep, self._name, rung, window)
        if not any(self._tune.metric in row for row in recent):
            known = (
                ", ".join(sorted(k for k, v in recent[-1].items() if isinstance(v, float))) if recent else ""
            )
            raise InputError(f"no row has the metric {self._tune.metric!r}", "tune.metric", f"known: {known}")
        found = [float(value) for row in recent if (value := row.get(self._tune.metric)) is not None]
        return statistics.fmean(found) if found else math.nan

    def _evaluated(self, evaluate: EvaluateSpec | None, rung: int) -> float:
        """Return the metric of the last evaluation, which is at the rung unless the run ended before it."""
        assert evaluate is not None
        every, (name, _, metric) = evaluate.every, self._tune.metric.partition(".")
        found = evaluations_in(lineage.latest(self._sweep, self._name, rung, every + 1))
        if not found:
            raise InputError(f"nothing was evaluated up to step {rung}", "evaluate.every", "lower it")
        return float(found[-1]["sets"][name].get(metric, math.nan))  # absent if nothing is predicted

    def _failed(self, reason: str) -> dict[str, Any]:
        """Return the result of a failed trial: the worst possible value, and the steps and USD that it used."""
        steps, usd = lineage.spent(self._sweep, self._name)
        result = {
            STEP: self._at,
            VALUE: self._worst,
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
    def _worst(self) -> float:
        """Return the value of a trial that failed or diverged. Infinite, because schedulers cannot order NaN."""
        return math.inf if self._tune.direction == "min" else -math.inf

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

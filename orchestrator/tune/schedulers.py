"""Schedulers, which decide what trials continue, and samplers, which choose values, for Ray Tune's interfaces.

They decide by the trial's own step, because Tune's count of results starts again with every restore.

HyperBand and median stopping are Tune's own, and PBT is Tune's with three methods replaced. ASHA is not: Tune's stops a
trial at once and for good, and keeps its rungs in memory. It trains every trial to the end if each is better than those
before, and in a continued search it promotes trials that it would have stopped. PB2 takes its values from `pb2`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ray.tune.schedulers import (
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from orchestrator.train.config import TrainSpec
from orchestrator.tune.config import POPULATION, SECOND, TuneSpec
from orchestrator.tune.pb2 import Gain, explored
from orchestrator.tune.rung_steps import asha_rungs, grace_of, interval_of, longest_warmup
from orchestrator.tune.space import Config, distribution_of, perturbed
from orchestrator.tune.trial import STEP, VALUE
from orchestrator.tune.trial_records import TrialRecords


def scheduler_of(tune: TuneSpec, train: TrainSpec, seed: int) -> TrialScheduler:
    """Return the scheduler of a search, for trials that train as in `train`, except for the keys of the search."""
    steps = train.steps
    warmup = longest_warmup(tune, train)
    if tune.scheduler == "asha":
        return Asha(asha_rungs(tune, steps, warmup), tune.reduction, tune.direction)
    if tune.scheduler == "hyperband":
        return HyperBandScheduler(STEP, max_t=steps, reduction_factor=tune.reduction)
    if tune.scheduler == "median":
        return MedianStoppingRule(STEP, grace_period=grace_of(tune, steps, warmup), min_samples_required=3)
    if tune.scheduler in POPULATION:
        population = Pbt if tune.scheduler == "pbt" else Pb2
        return population(tune, interval_of(tune, steps), warmup, seed)
    return FIFOScheduler()


class Asha(FIFOScheduler):
    """ASHA (Li et al., 2018, algorithm 2): the best 1/reduction of the trials that reached a rung continue.

    The others pause there with their commits, until more trials have arrived and they are among the best. Tune's own
    variant decides at once and for good, so it trains the trials that happen to arrive first to the end. When no new
    trials are left and none may continue, the search is over. The leader is trained to the end if no trial was.
    """

    def __init__(self, rungs: Sequence[int], reduction: int, mode: str) -> None:
        super().__init__()
        self._reduction = reduction
        self._sign = 1.0 if mode == "min" else -1.0
        self._last = rungs[-1]
        self._values: dict[int, dict[Any, float]] = {rung: {} for rung in rungs}
        """The metric of each trial that reached a rung, by rung; less is better."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See Ray."""
        self._note(trial, result)
        goes_on = result[STEP] not in self._values or trial in self._best(result[STEP])
        return self.CONTINUE if goes_on else self.PAUSE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """See Ray. The last result of a trial arrives only here, also if it ended under an earlier command."""
        self._note(trial, result)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """See Ray. The trial at the highest rung continues first."""
        live = [trial for trial in tune_controller.get_trials() if not trial.is_finished()]
        waiting = [trial for trial in live if trial.status in ("PAUSED", "PENDING")]
        for rung in reversed(self._values):
            for trial in self._best(rung):
                if trial in waiting and self._at(trial) == rung:
                    return trial
        new = next((trial for trial in waiting if trial.status == "PENDING"), None)
        if new or len(waiting) < len(live) or not live:
            return new
        if not self._values[self._last]:
            return min(waiting, key=lambda trial: (-self._at(trial), self._values[self._at(trial)][trial]))
        for trial in waiting:
            tune_controller.stop_trial(trial)
        return None

    def _note(self, trial: Any, result: dict[str, Any]) -> None:
        if result["failed"]:
            return
        reached: int | None = result[STEP]
        if result.get("ended"):  # a run that ended between two rungs is compared at the next one
            reached = next((rung for rung in self._values if rung >= result[STEP]), None)
        if reached in self._values:
            self._values[reached][trial] = self._sign * result[VALUE]

    def _best(self, rung: int) -> list[Any]:
        values = self._values[rung]
        return sorted(values, key=lambda trial: values[trial])[: len(values) // self._reduction]

    def _at(self, trial: Any) -> int:
        """Return the highest rung that a trial reached, 0 if none."""
        return max((rung for rung, values in self._values.items() if trial in values), default=0)


class Pbt(PopulationBasedTraining):
    """PBT (Jaderberg et al., 2017) that explores within the job's search space and keeps the names of trials.

    A decision waits until all trials are at the same step. A loss falls with time, so trials that are ahead would seem
    better than the others.

    Ray has no public interface for this, so four private names of `PopulationBasedTraining` are used:
    `_perturbation_interval`, `_next_perturbation_sync`, `_trial_state` and `_get_new_config`. If Ray renames one, PBT
    decides at its own steps or loses the name of a trial; tests of both fail then.
    """

    def __init__(self, tune: TuneSpec, interval: int, warmup: int, seed: int) -> None:
        self._space = tune
        self._source = random.Random(seed)
        super().__init__(
            time_attr=STEP,
            perturbation_interval=interval,
            burn_in_period=warmup + 1,
            synch=True,
            custom_explore_fn=lambda config: config,  # required by Tune; `_get_new_config` explores
        )

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See Ray. In a continued search some trials are ahead; the others catch up first."""
        if result[STEP] % self._perturbation_interval:
            return str(self.CONTINUE)  # the step of a promotion, where nothing is decided
        self._next_perturbation_sync = max(self._next_perturbation_sync, result[STEP])
        if result[STEP] < self._next_perturbation_sync:
            return str(self.CONTINUE)
        for other, state in self._trial_state.items():
            if other.is_finished():  # Ray would wait for a trial whose process died
                state.last_train_time = result[STEP]
        return str(super().on_trial_result(tune_controller, trial, result))

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """See Ray.

        If all live trials are paused and Ray chooses none, the trial that they wait for has failed. Then move the
        decision one interval later.
        """
        chosen = super().choose_trial_to_run(tune_controller)
        live = [trial for trial in tune_controller.get_trials() if not trial.is_finished()]
        if chosen is None and live and all(trial.status == "PAUSED" for trial in live):
            self._next_perturbation_sync += self._perturbation_interval
            chosen = super().choose_trial_to_run(tune_controller)
        return chosen

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        new = copy.deepcopy(trial.config)
        new["assignment"]["params"] = self._explored(trial, trial_to_clone)
        return new, {}

    def _explored(self, trial: Any, donor: Any) -> Config:
        return perturbed(self._space, donor.config["assignment"]["params"], self._source)


class Pb2(Pbt):
    """PB2: PBT with new values from `pb2.explored`. The gains so far are lost when a search is continued."""

    def __init__(self, tune: TuneSpec, interval: int, warmup: int, seed: int) -> None:
        super().__init__(tune, interval, warmup, seed)
        self._gains: list[Gain] = []
        self._before: dict[str, tuple[int, float]] = {}
        """The step and the value of each trial at its last result."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See Ray."""
        step = result[STEP]
        value = result[VALUE]
        assignment = trial.config["assignment"]
        if before := self._before.get(assignment["trial"]):
            gain = (value - before[1]) * (1 if self._space.direction == "max" else -1)
            self._gains.append(Gain(before[0], assignment["params"], gain))
        self._before[assignment["trial"]] = (step, value)
        return str(super().on_trial_result(tune_controller, trial, result))

    def _explored(self, trial: Any, donor: Any) -> Config:
        assignment = trial.config["assignment"]
        donor_assignment = donor.config["assignment"]
        step_and_value = self._before[donor_assignment["trial"]]
        self._before[assignment["trial"]] = step_and_value
        step = step_and_value[0]
        return explored(self._space, donor_assignment["params"], self._gains, step, self._source)


class Tpe(Searcher):
    """Optuna's tree-structured Parzen estimator (Bergstra et al., 2011). Trials of earlier commands come first.

    A trial counts with its last result, also while it is paused at a rung. A trial is recorded before Tune knows it.
    """

    def __init__(
        self,
        tune: TuneSpec,
        seed: int,
        records: TrialRecords,
        names: list[str],
        assignment_of: Callable[[str, Config], dict[str, Any]],
    ) -> None:
        """Continue from the records of a search.

        Args:
            tune: the search.
            seed: the seed of the job.
            records: the records.
            names: the trials to continue.
            assignment_of: makes a trial's config from its name and its values.
        """
        super().__init__(metric=VALUE, mode=tune.direction)
        self._directions: list[Literal["minimize", "maximize"]] = [
            "minimize" if each == "min" else "maximize" for each in tune.directions
        ]
        self._seed = seed
        self._distributions = {key: distribution_of(value) for key, value in tune.space.items()}
        self._records = records
        self._names = names
        self._assignment_of = assignment_of
        self._configs: dict[str, Config] = {}
        self._reported: dict[str, dict[str, Any] | None] = {}
        """The last result of each trial by Tune's id, None if it failed."""

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """See Ray. Return the next recorded trial, or else a new one."""
        name = self._names.pop(0) if self._names else self._records.draw([self._drawn()])[0]
        self._configs[trial_id] = self._records.configs[name]
        return {"assignment": self._assignment_of(name, self._configs[trial_id])}

    def _drawn(self) -> Config:
        """Draw new values, which depend on the seed and on the results so far."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = self._seed * 1_000_003 + len(self._configs)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(directions=self._directions, sampler=sampler)
        study.add_trials([self._known(trial_id) for trial_id in self._configs])
        return dict(study.ask(self._distributions).params)

    def _known(self, trial_id: str) -> Any:
        from optuna.trial import TrialState, create_trial

        result = self._reported.get(trial_id)
        state = (
            TrialState.COMPLETE
            if result
            else TrialState.FAIL
            if trial_id in self._reported
            else TrialState.RUNNING
        )
        values = [result[VALUE], result.get(SECOND)][: len(self._directions)] if result else None
        params = self._configs[trial_id]
        return create_trial(state=state, values=values, params=params, distributions=self._distributions)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """See Ray. Note the result of a trial at a rung."""
        self._reported[trial_id] = result

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """See Ray. Tune passes no result for a trial that is stopped while it is paused."""
        last = result or self._reported.get(trial_id)
        self._reported[trial_id] = None if error or not last or last.get("failed") else last

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its searchers; the records hold open files and locks

    def save(self, checkpoint_path: str) -> None:
        """See Ray. Nothing to do: all state is in trials.jsonl."""

    def restore(self, checkpoint_path: str) -> None:
        """See Ray. Nothing to do: all state is in trials.jsonl."""

"""Tune's schedulers and samplers for a job's search, deciding by a trial's own steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from orchestrator.tune.bandit import Gain, explored
from orchestrator.tune.ledger import Ledger
from orchestrator.tune.rungs import grace_of, interval_of
from orchestrator.tune.space import Config, perturbed
from orchestrator.tune.spec import POPULATION, Dimension, TuneSpec
from orchestrator.tune.trial import STEP, VALUE


def scheduler_of(tune: TuneSpec, steps: int, seed: int) -> TrialScheduler:
    """What decides which trials go on."""
    if tune.scheduler == "asha":
        grace = grace_of(tune, steps)
        return ASHAScheduler(STEP, max_t=steps, grace_period=grace, reduction_factor=tune.reduction)
    if tune.scheduler == "hyperband":
        return HyperBandScheduler(STEP, max_t=steps, reduction_factor=tune.reduction)
    if tune.scheduler == "median":
        return MedianStoppingRule(STEP, grace_period=grace_of(tune, steps), min_samples_required=3)
    if tune.scheduler in POPULATION:
        return (Pbt if tune.scheduler == "pbt" else Pb2)(tune, interval_of(tune, steps), seed)
    return FIFOScheduler()


class Pbt(PopulationBasedTraining):
    """PBT that explores within the space of the job, and leaves a trial its name."""

    def __init__(self, tune: TuneSpec, interval: int, seed: int) -> None:
        self._space, self._source = tune, random.Random(seed)
        super().__init__(
            time_attr=STEP,
            perturbation_interval=interval,
            custom_explore_fn=lambda config: config,  # what Tune asks for; `_get_new_config` explores
        )

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        new = copy.deepcopy(trial.config)
        new["given"]["params"] = self._explored(trial, trial_to_clone)
        return new, {}

    def _explored(self, trial: Any, donor: Any) -> Config:
        return perturbed(self._space, donor.config["given"]["params"], self._source)


class Pb2(Pbt):
    """PB2: as PBT, but the new values are those of `bandit.explored`. A search that goes on learns anew."""

    def __init__(self, tune: TuneSpec, interval: int, seed: int) -> None:
        super().__init__(tune, interval, seed)
        self._gains: list[Gain] = []
        self._before: dict[str, tuple[int, float]] = {}
        """Step and value of each trial at its last result."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See Ray."""
        step, value, given = result[STEP], result[VALUE], trial.config["given"]
        if before := self._before.get(given["trial"]):
            gain = (value - before[1]) * (1 if self._space.mode == "max" else -1)
            self._gains.append(Gain(before[0], given["params"], gain))
        self._before[given["trial"]] = (step, value)
        return str(super().on_trial_result(tune_controller, trial, result))

    def _explored(self, trial: Any, donor: Any) -> Config:
        own, given = trial.config["given"], donor.config["given"]
        self._before[own["trial"]] = step, _ = self._before[given["trial"]]
        return explored(self._space, given["params"], self._gains, step, self._source)


class Tpe(Searcher):
    """Optuna's tree-structured Parzen estimator, told of every trial of earlier commands first.

    `given` makes a trial's config from its name and values; a trial is in the ledger before Tune knows of it.
    """

    def __init__(
        self,
        tune: TuneSpec,
        seed: int,
        ledger: Ledger,
        names: list[str],
        given: Callable[[str, Config], dict[str, Any]],
    ) -> None:
        super().__init__(metric=VALUE, mode=tune.mode)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        direction = optuna.study.StudyDirection(1 if tune.mode == "min" else 2)
        self._study = optuna.create_study(direction=direction)
        self._distributions = {key: _distribution(value) for key, value in tune.space.items()}
        self._ledger, self._names, self._given = ledger, names, given
        self._asked: dict[str, Any] = {}
        self._sampler, self._seed = optuna.samplers.TPESampler, seed
        self._failed = optuna.trial.TrialState.FAIL

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """The next trial: one that is on record first."""
        recorded = self._names.pop(0) if self._names else None
        if recorded is not None:
            self._study.enqueue_trial(self._ledger.configs[recorded])
        # Else what a resumed search draws next would be what it drew first.
        number = len(self._study.trials)
        self._study.sampler = self._sampler(seed=self._seed * 1_000_003 + number, constant_liar=True)
        asked = self._study.ask(self._distributions)
        self._asked[trial_id] = asked
        name = recorded or self._ledger.draw([dict(asked.params)])[0]
        return {"given": self._given(name, self._ledger.configs[name])}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the study."""
        asked = self._asked.pop(trial_id, None)
        if asked is None:
            return
        if error or not result or result.get("failed"):
            self._study.tell(asked, state=self._failed)
        else:
            self._study.tell(asked, result[VALUE])

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger has it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger has it all."""


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.listed is not None:
        return CategoricalDistribution(dimension.listed)
    low, high = dimension.ends
    if dimension.integer is not None:
        return IntDistribution(int(low), int(high))
    return FloatDistribution(low, high, log=dimension.loguniform is not None)

"""Which keys explain the differences between trials."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.tune.config import Dimension
from orchestrator.tune.report import importance
from orchestrator.tune.space import distribution_of

SPACE: dict[str, Any] = {
    "lr": Dimension(loguniform=(1e-4, 1e-1)),
    "other": Dimension(integer=(0, 4)),
    "kind": Dimension(choice=["a", "b"]),
}


def configs(count: int) -> list[dict[str, Any]]:
    return [
        {"lr": 10 ** (-4 + 3 * n / (count - 1)), "other": (n * 7) % 5, "kind": "ab"[n % 2]}
        for n in range(count)
    ]


def test_the_key_that_decides_is_first() -> None:
    trials = configs(8)
    found = importance(SPACE, trials, [math.log10(config["lr"]) for config in trials])
    assert next(iter(found)) == "lr"
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_value_that_is_best_in_the_middle_of_its_range_counts_too() -> None:
    trials = configs(16)
    found = importance(SPACE, trials, [(math.log10(config["lr"]) + 2.5) ** 2 for config in trials])
    assert found["lr"] > 0.6


def test_a_choice_that_decides_alone_explains_all() -> None:
    found = importance({"kind": SPACE["kind"]}, [{"kind": k} for k in "aabb"], [1.0, 1.0, 5.0, 5.0])
    assert found == {"kind": pytest.approx(1.0)}


def test_too_few_or_equal_trials_say_nothing() -> None:
    assert importance(SPACE, configs(3), [1.0, 2.0, 3.0]) == {}
    assert importance(SPACE, configs(5), [1.0] * 5) == {}


def test_importances_are_fanova_s_whatever_optuna_takes_by_itself() -> None:
    """Optuna 5 takes PED-ANOVA, which looks at the best trials alone: its shares are others."""
    import optuna

    keys = {key: SPACE[key] for key in ("lr", "other")}
    trials = [{key: config[key] for key in keys} for config in configs(16)]
    values = [(math.log10(config["lr"]) + 2.5) ** 2 + 0.1 * config["other"] for config in trials]
    distributions = {key: distribution_of(dimension) for key, dimension in keys.items()}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    for params, value in zip(trials, values, strict=True):
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    by_itself = optuna.importance.get_param_importances(study)
    named = [
        optuna.importance.get_param_importances(study, evaluator=evaluator)
        for evaluator in (
            optuna.importance.PedAnovaImportanceEvaluator(),
            optuna.importance.FanovaImportanceEvaluator(seed=0),
        )
    ]
    assert by_itself == named[0]
    ours = importance(keys, trials, values)
    assert ours == pytest.approx(named[1])
    assert abs(ours["lr"] - by_itself["lr"]) > 0.01

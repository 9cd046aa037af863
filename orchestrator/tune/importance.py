"""How much of the differences between trials each searched key explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.config.tune import Dimension
from orchestrator.tune.space import Config, distribution_of

LEAST_TRIALS = 4
"""Fewer say nothing."""


def importance(
    space: Mapping[str, Dimension], configs: Sequence[Config], values: Sequence[float]
) -> dict[str, float]:
    """Share of the variance of the values, 0 to 1, that each key explains by itself; the shares sum to 1.

    fANOVA (Hutter et al., 2014, "An Efficient Approach for Assessing Hyperparameter Importance") as Optuna computes
    it, most important key first. Empty for too few trials, or where all values are equal.
    """
    if len(values) < LEAST_TRIALS or len(set(values)) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {key: distribution_of(dimension) for key, dimension in space.items()}
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(params=config, distributions=distributions, value=value)
            for config, value in zip(configs, values, strict=True)
        ]
    )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in found.items()}

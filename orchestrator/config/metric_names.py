"""The metrics of an evaluation by name, and which value of each is the best.

Imports only the standard library, because the commit writer of every rank uses it to find the best commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

OfAnswers = Literal["reward_margin", "chosen_reward", "rejected_reward"]
"""Metrics of objectives that learn from preferences."""
OfRewards = Literal["reward", "answer_tokens", "unfinished", "entropy"]
"""Metrics of answers that the model generates, of objectives that learn from rewards."""
PASS_AT = "pass_at_"
"""The beginning of metrics of several answers to a prompt, see `pass_at`."""
OfWords = Literal["chosen_log_probability", "rejected_log_probability"]
"""Preference metrics of a text model, which a reward model does not have."""
OfClasses = Literal["precision", "recall", "f1", "matthews"]
"""Metrics over all class predictions together."""
OfPredictions = Literal[OfClasses, "spearman"]
"""Metrics over all predictions together; computed only on request."""
Metric = Literal[
    "loss", "perplexity", "bits_per_byte", "accuracy", OfAnswers, OfWords, OfRewards, OfPredictions
]
PARTS_OF_LOSS = ("label_loss", "logit_loss", "hidden_loss", "relation_loss")
"""The parts of the loss of a distilled student, before they are weighted."""
_LARGER_IS_BETTER: frozenset[str] = frozenset(
    {
        "accuracy",
        "zero_shot",
        "reward",
        "reward_margin",
        "chosen_reward",
        "chosen_log_probability",
        *get_args(OfPredictions),
        "tokens_per_second",
        "model_flops_per_second",
        "mfu",
    }
)
"""Metrics whose largest value is the best; for all others it is the smallest. Some are step metrics, for searches."""


def parts_of_loss(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a step's loss by what they compare, such as logit; empty if it has none."""
    return {name.removesuffix("_loss"): row[name] for name in PARTS_OF_LOSS if row.get(name) is not None}


def by_name(sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all sets by name, such as validation.loss."""
    return {f"{name}.{metric}": value for name, metrics in sets.items() for metric, value in metrics.items()}


def pass_at(answers: int) -> str:
    """Return the name of the metric that at least one of so many answers is right."""
    return f"{PASS_AT}{answers}"


def larger_is_better(name: str) -> bool:
    """Return whether the largest value of a metric is the best, by a name such as validation.accuracy."""
    metric = name.rpartition(".")[2]
    return metric in _LARGER_IS_BETTER or metric.startswith(PASS_AT)

"""The metrics of an evaluation by name, and which value of one is the best.

Imports nothing but the standard library: the process that writes commits, one a rank, asks which commit is the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

OfAnswers = Literal["reward_margin", "chosen_reward", "rejected_reward"]
"""Metrics of objectives that read which answers people prefer."""
OfWords = Literal["chosen_log_probability", "rejected_log_probability"]
"""Those of them that a model of text has, and a reward model does not."""
OfClasses = Literal["precision", "recall", "f1", "matthews"]
"""Metrics of all predictions of classes together."""
OfPredictions = Literal[OfClasses, "spearman"]
"""Metrics of all predictions together, which are given where they are asked for."""
Metric = Literal["loss", "perplexity", "bits_per_byte", "accuracy", OfAnswers, OfWords, OfPredictions]
_LARGER_IS_BETTER: frozenset[str] = frozenset(
    {
        "accuracy",
        "zero_shot",
        "reward_margin",
        "chosen_reward",
        "chosen_log_probability",
        *get_args(OfPredictions),
        "tokens_per_second",
        "model_flops_per_second",
        "mfu",
    }
)
"""Metrics of which the largest value is the best; of the others it is the least. Some are of steps, for searches."""


def by_name(sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of all sets by name, as in validation.loss."""
    return {f"{name}.{metric}": value for name, found in sets.items() for metric, value in found.items()}


def larger_is_better(name: str) -> bool:
    """Whether the largest value of a metric is the best, by its name as in validation.accuracy."""
    return name.rpartition(".")[2] in _LARGER_IS_BETTER

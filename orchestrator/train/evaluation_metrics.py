"""The metrics of an evaluation, from its sums over all tokens of a set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import get_args

from torch import Tensor

from orchestrator.evaluate.config import OfPredictions
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.router_load import ratios
from workloads.objectives.distillation import LOGIT_LOSS
from workloads.objectives.metrics import measure
from workloads.objectives.preferences import means


def means_of_own_model(sums: EvaluationSums) -> dict[str, float]:
    """Return the metrics of a user's model: its mean loss, and the means of its other sums."""
    loss = {"loss": sums.loss / sums.tokens} if sums.tokens else {}
    return {**loss, **means(sums.sums)}


def measures(
    sums: EvaluationSums, tokens_per_byte: float, metrics: Iterable[str], classes: int = 0
) -> dict[str, float]:
    """Return the metrics of an evaluation, and the number of predicted tokens. Means of no values are left out.

    perplexity = exp(loss); bits_per_byte = loss / ln 2 x tokens per byte (The Pile, Gao et al., 2020, section 3.1).
    Models with experts also have the balance of their routers, and students the divergence from their teacher.

    Args:
        sums: sums over the held-out set.
        tokens_per_byte: tokens of the set per byte of its text.
        metrics: names of the metrics that the job wants.
        classes: number of classes of a classifier.
    """
    values = means(sums.sums)
    if sums.tokens:
        loss = sums.loss / sums.tokens
        values = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": loss / math.log(2) * tokens_per_byte,
            "accuracy": sums.correct / sums.tokens,
            **values,
        }
    values |= {
        name: _metric_of_predictions(name, sums.predictions, classes)
        for name in metrics
        if name in get_args(OfPredictions) and len(sums.predictions)
    }
    reported = {name: value for name, value in values.items() if name in (*metrics, LOGIT_LOSS)}
    return {**reported, **ratios(sums.routed), "tokens": sums.tokens}


def _metric_of_predictions(metric: str, predictions: Tensor, classes: int) -> float:
    rows = sorted(predictions.tolist())  # so that the order of samples changes no bit
    number_type = float if metric == "spearman" else int
    values = [number_type(row[0]) for row in rows]
    labels = [number_type(row[1]) for row in rows]
    return measure(metric, values, labels, classes)

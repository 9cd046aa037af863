"""How much of the differences between trials each searched key explains, alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LEAST_TRIALS = 4
"""Fewer say nothing."""


def importance(configs: Sequence[dict[str, Any]], values: Sequence[float]) -> dict[str, float]:
    """Share of the variance of the values' ranks, 0 to 1, that each key explains without the others.

    The squared rank correlation (Spearman, 1904) for numbers, the squared correlation ratio (Fisher, 1925) of groups
    of equal values otherwise. Keys that only matter together show little here. Empty for too few trials.
    """
    if len(values) < LEAST_TRIALS or len(set(values)) < 2:
        return {}
    target = _ranks(list(values))
    found = {}
    for key in configs[0]:
        column = [config[key] for config in configs]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in column)
        if numbers and len(set(column)) > 1:
            found[key] = _correlation(_ranks(column), target) ** 2
        else:
            found[key] = _correlation_ratio([str(v) for v in column], target)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _ranks(values: list[Any]) -> list[float]:
    """Ranks from 0 on; equal values share their mean rank."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return float(covariance / spread**0.5) if spread else 0.0


def _correlation_ratio(groups: Sequence[str], target: Sequence[float]) -> float:
    """Variance between groups over variance in all."""
    mean = sum(target) / len(target)
    whole = sum((y - mean) ** 2 for y in target)
    between = 0.0
    for group in set(groups):
        inside = [y for g, y in zip(groups, target, strict=True) if g == group]
        between += len(inside) * (sum(inside) / len(inside) - mean) ** 2
    return between / whole if whole else 0.0

"""Early stopping: the best value of a metric, and whether it has not improved for some evaluations."""

from __future__ import annotations

import math
from typing import NamedTuple

from orchestrator.config.metric_names import larger_is_better
from orchestrator.evaluate.config import StopWhen


class BestValue(NamedTuple):
    """The best value of a metric so far.

    Attributes:
        value: the value; None before the first evaluation that has one.
        stale: number of evaluations since.
    """

    value: float | None = None
    stale: int = 0

    def after(self, stop_when: StopWhen, value: float) -> BestValue:
        """Return the best value after one more evaluation.

        A value must be better than the best one by more than `min_delta`. Small gains add up, because each is compared
        with the best value and not with the one before.

        Args:
            stop_when: the metric, and the smallest change that counts as an improvement.
            value: the metric's new value; NaN if the evaluation predicted nothing.
        """
        sign = -1.0 if larger_is_better(stop_when.metric) else 1.0
        improves = self.value is None or sign * (self.value - value) > stop_when.min_delta
        if improves and not math.isnan(value):
            return BestValue(value)
        return BestValue(self.value, self.stale + 1)

    def is_on_plateau(self, stop_when: StopWhen) -> bool:
        """Whether the metric has not improved for `patience` evaluations."""
        return self.stale >= stop_when.patience

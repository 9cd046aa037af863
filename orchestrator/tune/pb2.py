"""PB2's explore step: the values that a Gaussian process believes would gain most, or knows least of.

Parker-Holder et al., 2020, "Provably Efficient Online Hyperparameter Optimization with Population-Based Bandits". What
is learnt is the gain of a trial from one decision to the next, as a function of its values and of when that was: here
the step is a further input of the kernel, where the paper has a rate of forgetting.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.config.tune import Dimension, TuneSpec
from orchestrator.tune.space import Config, draw, perturbed

CANDIDATES = 500
KAPPA = 2.0
"""Standard deviations that the upper bound of a gain lies above its mean."""
LEAST = 4
"""Gains before a process is fitted; values are drawn anew until then."""


@dataclass(frozen=True)
class Gain:
    """Improvement of the metric of a trial with these values, from the decision before to `step`; more is better."""

    step: int
    config: Mapping[str, Any]
    value: float


def explored(
    tune: TuneSpec, current: Mapping[str, Any], gains: Sequence[Gain], step: int, source: random.Random
) -> Config:
    """New values for a trial that takes over the donor's commit at `step`.

    `current` are the donor's values. Keys with listed values change as under PBT; those with a range get the candidate
    with the highest upper bound of its gain.
    """
    ranges = {key: dimension for key, dimension in tune.space.items() if dimension.listed is None}
    found = perturbed(tune, current, source)
    drawn = [{key: draw(dimension, source) for key, dimension in ranges.items()} for _ in range(CANDIDATES)]
    usable = [gain for gain in gains if math.isfinite(gain.value)]
    if len(usable) < LEAST:
        return found | drawn[0]
    best = _upper_bounds(ranges, usable, step, drawn, source).argmax()
    return found | drawn[int(best)]


def _upper_bounds(
    ranges: Mapping[str, Dimension],
    gains: Sequence[Gain],
    step: int,
    drawn: Sequence[Config],
    source: random.Random,
) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    last = max(step, *(gain.step for gain in gains))
    known = np.array([[gain.step / last, *_unit(ranges, gain.config)] for gain in gains])
    asked = np.array([[step / last, *_unit(ranges, config)] for config in drawn])
    values = np.array([gain.value for gain in gains])
    spread = values.std() or 1.0
    kernel = RBF(np.full(known.shape[1], 0.5), (0.05, 5.0)) + WhiteKernel(0.1, (1e-3, 1.0))
    process = GaussianProcessRegressor(kernel, random_state=source.randrange(2**31))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # a length scale at its bound is as good as any beyond it
        process.fit(known, (values - values.mean()) / spread)
    mean, deviation = process.predict(asked, return_std=True)
    return mean + KAPPA * deviation


def _unit(ranges: Mapping[str, Dimension], config: Mapping[str, Any]) -> list[float]:
    """Values scaled to 0 to 1 within their ranges, in the logarithm where the range is logarithmic."""
    found = []
    for key, dimension in ranges.items():
        low, high = dimension.ends
        value = float(config[key])
        if dimension.loguniform:
            low, high, value = math.log(low), math.log(high), math.log(value)
        found.append((value - low) / (high - low))
    return found

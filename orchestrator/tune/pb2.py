"""PB2's explore step: choose values by the upper confidence bound of a Gaussian process.

Parker-Holder et al., 2020, "Provably Efficient Online Hyperparameter Optimization with Population-Based Bandits". The
process models the gain of a trial from one decision to the next as a function of its values and of the step. The step
is a further input of the kernel; it replaces the paper's rate of forgetting.

Ray Tune has PB2, too. Its values depend on NumPy's global generator, so a search is not the same again under the same
seed. It scales values linearly, and it takes ranges only, so neither layouts nor other listed values.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.tune.config import Dimension, TuneSpec
from orchestrator.tune.space import Config, draw, perturbed

CANDIDATES = 500
"""Points at which the upper bound is evaluated."""
KAPPA = 2.0
"""The upper bound of a gain is this many standard deviations above its mean."""
LEAST = 4
"""The number of gains from which on a process is fitted. Values are drawn at random until then."""


@dataclass(frozen=True)
class Gain:
    """The improvement of a trial's metric from one decision to the next, with these values. More is better."""

    step: int
    config: Mapping[str, Any]
    value: float


def explored(
    tune: TuneSpec, current: Mapping[str, Any], gains: Sequence[Gain], step: int, source: random.Random
) -> Config:
    """Return new values for a trial that takes over a donor's commit.

    Keys with listed values change as under PBT. Keys with a range get the candidate with the highest upper bound.

    Args:
        tune: the search.
        current: the donor's values.
        gains: the gains so far.
        step: the step of the commit.
        source: the random numbers.
    """
    ranges = {key: dimension for key, dimension in tune.space.items() if dimension.listed is None}
    changed = perturbed(tune, current, source)
    drawn = [{key: draw(dimension, source) for key, dimension in ranges.items()} for _ in range(CANDIDATES)]
    usable = [gain for gain in gains if math.isfinite(gain.value)]
    if len(usable) < LEAST:
        return changed | drawn[0]
    best = _upper_bounds(ranges, usable, step, drawn, source).argmax()
    return changed | drawn[int(best)]


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
    candidates = np.array([[step / last, *_unit(ranges, config)] for config in drawn])
    values = np.array([gain.value for gain in gains])
    spread = values.std() or 1.0
    kernel = RBF(np.full(known.shape[1], 0.5), (0.05, 5.0)) + WhiteKernel(0.1, (1e-3, 1.0))
    process = GaussianProcessRegressor(kernel, random_state=source.randrange(2**31))
    with warnings.catch_warnings():
        # A length scale at its bound is as good as any beyond it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(known, (values - values.mean()) / spread)
    mean, deviation = process.predict(candidates, return_std=True)
    return mean + KAPPA * deviation


def _unit(ranges: Mapping[str, Dimension], config: Mapping[str, Any]) -> list[float]:
    """Scale values to 0 to 1 within their ranges, logarithmically for logarithmic ranges."""
    result = []
    for key, dimension in ranges.items():
        low, high = dimension.ends
        value = float(config[key])
        if dimension.loguniform:
            low = math.log(low)
            high = math.log(high)
            value = math.log(value)
        result.append((value - low) / (high - low))
    return result

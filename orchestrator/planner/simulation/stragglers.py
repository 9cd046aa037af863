"""Ranks that are late: in every step each takes some time more than its least, and all wait for the last.

What a rank takes more is exponentially distributed, so that its seconds are a shifted exponential, as of workers in Lee
et al. (2018), "Speeding up distributed machine learning using codes", section III. What holds a rank up is what else
its processor does, its clock's frequency, its share of the work where that differs.
"""

from __future__ import annotations

import math
from functools import lru_cache

FEW = 32
"""Up to so many ranks the mean of the last is summed; beyond, the series of the harmonic number is as exact."""


@lru_cache(maxsize=4096)
def last_of(ranks: int) -> float:
    """How many times the mean delay of a rank the last of so many ranks is late, in the mean: the harmonic number."""
    if ranks <= FEW:
        return sum(1.0 / n for n in range(1, ranks + 1))
    return math.log(ranks) + 0.5772156649015329 + 1.0 / (2 * ranks) - 1.0 / (12 * ranks**2)


def latest_of(ranks: int, share: float) -> float:
    """How many times the mean delay of a rank the last of so many is late at most, in that share of the steps: the
    quantile of the largest of so many exponential variables."""
    return -math.log1p(-(share ** (1.0 / ranks)))

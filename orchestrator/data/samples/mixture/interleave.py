"""Which of several sources each position belongs to, in exact proportions over every window, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST = 2**24
"""Largest sum of weights: products with a remainder then stay far below 2^63."""


class Interleave:
    """Sources by whole `weights`, one position after the other; a source of weight 0 has none.

    The heaviest source takes round(w p / W) of the first p positions, those left are divided among the others in the
    same way, and so on. Of k sources, how many of the first p positions a source has then differs from its proportion
    w p / W by at most (1 + H(k - 1)) / 2, H the harmonic numbers: less than 1 for two sources, 2 for ten, 3.1 for a
    hundred. The difference over a window of positions is at most twice that.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """Raises ValueError if the weights are negative, all zero, or more than MOST together."""
        left = sum(weights)
        if min(weights) < 0 or not 0 < left <= MOST:
            raise ValueError(f"weights {list(weights)} are not from 0 on, with a sum from 1 to {MOST}")
        self.weights = tuple(weights)
        self._levels = []
        for source in sorted(range(len(weights)), key=lambda number: (-weights[number], number)):
            if weights[source]:
                self._levels.append((source, weights[source], left))
                left -= weights[source]

    def at(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each `place`, and how many places of the same source come before it; int64 of its shape."""
        left = np.array(place, dtype=np.int64).ravel()
        source = np.zeros_like(left)
        before = np.zeros_like(left)
        index = np.arange(left.size)
        for number, weight, total in self._levels:
            taken = _rounded(weight, left, total)
            mine = _rounded(weight, left + 1, total) > taken
            source[index[mine]], before[index[mine]] = number, taken[mine]
            left = (left - taken)[~mine]
            index = index[~mine]
        shape = np.shape(place)
        return source.reshape(shape), before.reshape(shape)

    def counts(self, places: int) -> list[int]:
        """How many of the first `places` each source has."""
        found = [0] * len(self.weights)
        for number, weight, total in self._levels:
            found[number] = (2 * weight * places + total) // (2 * total)
            places -= found[number]
        return found

    def reach(self, source: int, count: int) -> int:
        """The fewest places that have `count` of a source whose weight is not 0."""
        low = -1
        high = 1
        while self.counts(high)[source] < count:
            low = high
            high = 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[source] >= count else (middle, high)
        return high if count else 0


def _rounded(weight: int, count: np.ndarray, total: int) -> np.ndarray:
    """weight x count / total to the nearest whole number, halves up, without an overflow; int64."""
    whole, rest = np.divmod(count, total)
    rounded: np.ndarray = whole * weight + (2 * weight * rest + total) // (2 * total)
    return rounded

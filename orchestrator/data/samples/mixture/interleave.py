"""Assign positions to sources, in exact proportions over every window, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST = 2**24
"""Largest sum of weights, so that products with a remainder stay far below 2^63."""


class Interleave:
    """Interleaves sources by integer `weights`, position by position. A source of weight 0 gets no position.

    The heaviest source takes round(w p / W) of the first p positions. The rest is divided among the other sources in
    the same way, and so on. With k sources, a source's number of the first p positions differs from its proportion w
    p / W by at most (1 + H(k - 1)) / 2, where H are the harmonic numbers: less than 1 for two sources, 2 for ten, 3.1
    for a hundred. The difference over any window of positions is at most twice that.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """Raises ValueError if a weight is negative, if all are zero, or if their sum is more than MOST."""
        weight_left = sum(weights)
        if min(weights) < 0 or not 0 < weight_left <= MOST:
            raise ValueError(f"weights {list(weights)} are not from 0 on, with a sum from 1 to {MOST}")
        self.weights = tuple(weights)
        self._levels = []
        for source in sorted(range(len(weights)), key=lambda number: (-weights[number], number)):
            if weights[source]:
                self._levels.append((source, weights[source], weight_left))
                weight_left -= weights[source]

    def at(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and how many earlier positions have the same source; int64
        of its shape."""
        offsets = np.array(position, dtype=np.int64).ravel()
        source = np.zeros_like(offsets)
        before = np.zeros_like(offsets)
        index = np.arange(offsets.size)
        for number, weight, total in self._levels:
            drawn = _rounded(weight, offsets, total)
            mine = _rounded(weight, offsets + 1, total) > drawn
            source[index[mine]], before[index[mine]] = number, drawn[mine]
            offsets = (offsets - drawn)[~mine]
            index = index[~mine]
        shape = np.shape(position)
        return source.reshape(shape), before.reshape(shape)

    def counts(self, length: int) -> list[int]:
        """Return how many of the first `length` positions each source has."""
        counts = [0] * len(self.weights)
        for number, weight, total in self._levels:
            counts[number] = (2 * weight * length + total) // (2 * total)
            length -= counts[number]
        return counts

    def reach(self, source: int, count: int) -> int:
        """Return the smallest number of positions that includes `count` of a source with a positive weight."""
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
    """Return weight x count / total rounded to the nearest integer, halves up, without overflow; int64."""
    quotient, remainder = np.divmod(count, total)
    rounded: np.ndarray = quotient * weight + (2 * weight * remainder + total) // (2 * total)
    return rounded

"""The order of samples of a mixture: a pure function of (seed, position), in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from orchestrator.data.mixture.interleave import Interleave
from orchestrator.data.order import mix, permute
from orchestrator.job.errors import InputError


@dataclass(frozen=True)
class _Stretch:
    """Positions from `start` on are interleaved by `lanes`; `before` of each source came earlier."""

    start: int
    lanes: Interleave
    before: tuple[int, ...]


class MixedOrder:
    """The sequence of samples over sources in given proportions.

    There is no epoch: each source is read in passes of its own, every sample of it once in each, shuffled anew, one
    pass after the other. The n-th sample of a source is number n modulo its size of pass n / size, and n follows from
    the position (see `Interleave`). A source that has made the most passes that it may comes no more: from then on the
    others share its places in their proportions.

    Args:
        seed: determines the order.
        samples: number of samples of each source, at least 1.
        phases: the first position of each, ascending from 0, and the whole weights of all sources in it.
        most: the passes that each source may make, None for any number.
    """

    def __init__(
        self,
        seed: int,
        samples: Sequence[int],
        phases: Sequence[tuple[int, Sequence[int]]],
        most: Sequence[Fraction | None] = (),
    ) -> None:
        self.seed, self.samples = seed, list(samples)
        limits = [
            None if passes is None else int(passes * count)
            for passes, count in zip(most or [None] * len(samples), samples, strict=True)
        ]
        self._stretches, self.size = _stretches(phases, limits)
        self._starts = [stretch.start for stretch in self._stretches]
        self._offsets = np.cumsum(self.samples) - self.samples
        self._seeds = [_seed_of(seed, n) for n in range(len(samples))]

    def at(self, position: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """(turn, sample id) at each global `position`, as `Order.at`; the turn is the pass over the sample's source.

        Raises InputError beyond the end of the order, see `size`.
        """
        position = np.asarray(position, dtype=np.int64)
        if self.size is not None and position.size and int(position.max()) >= self.size:
            raise InputError(
                f"all sources have made the passes that they may after {self.size} samples",
                "data.sources",
                "raise max_passes, or train for fewer steps",
            )
        source, number = self._drawn(position.ravel())
        turn, sample = np.zeros_like(number), np.zeros_like(number)
        for which in np.unique(source):
            mine, size = source == which, self.samples[which]
            turn[mine], index = np.divmod(number[mine], size)
            sample[mine] = self._offsets[which] + permute(index, turn[mine], size, self._seeds[which])
        return turn.reshape(position.shape), sample.reshape(position.shape)

    def drawn(self, position: int) -> list[int]:
        """How many samples of each source come before `position`."""
        stretch = self._stretches[int(np.searchsorted(self._starts, position, side="right")) - 1]
        counts = stretch.lanes.counts(position - stretch.start)
        return [before + count for before, count in zip(stretch.before, counts, strict=True)]

    def changes(self) -> list[tuple[int, tuple[int, ...]]]:
        """The positions from which on other weights hold, and these."""
        return [(stretch.start, stretch.lanes.weights) for stretch in self._stretches]

    def _drawn(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how many of its samples come before."""
        which = np.searchsorted(self._starts, position, side="right") - 1
        source, number = np.zeros_like(position), np.zeros_like(position)
        for index in np.unique(which):
            mine, stretch = which == index, self._stretches[index]
            source[mine], count = stretch.lanes.at(position[mine] - stretch.start)
            number[mine] = np.array(stretch.before, dtype=np.int64)[source[mine]] + count
        return source, number


def _stretches(
    phases: Sequence[tuple[int, Sequence[int]]], limits: Sequence[int | None]
) -> tuple[list[_Stretch], int | None]:
    """The phases, each cut where a source has come as often as it may; and where none is left, None for never."""
    found: list[_Stretch] = []
    before = [0] * len(limits)
    ends = [*(start for start, _ in phases[1:]), None]
    for (start, weights), end in zip(phases, ends, strict=True):
        while end is None or start < end:
            left = [
                w if n is None or done < n else 0 for w, done, n in zip(weights, before, limits, strict=True)
            ]
            if not any(left):
                return found, start
            lanes = Interleave(left)
            stops = [
                lanes.reach(source, limit - before[source])
                for source, limit in enumerate(limits)
                if limit is not None and left[source]
            ]
            found.append(_Stretch(start, lanes, tuple(before)))
            stop = min([start + count for count in stops] + ([] if end is None else [end]), default=None)
            if stop is None:
                return found, None
            before = [a + b for a, b in zip(before, lanes.counts(stop - start), strict=True)]
            start = stop
    return found, None


def _seed_of(seed: int, source: int) -> int:
    """A seed of a source's own: sources of one size are not shuffled alike."""
    return int(mix(mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(source + 1))[0])

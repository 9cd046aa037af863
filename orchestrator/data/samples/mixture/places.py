"""The positions of sources in a mixture: the source at each position, and how often it came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.data.samples.mixture.interleave import Interleave


@dataclass(frozen=True)
class _Stretch:
    """Positions from `start` on are interleaved by `lanes`. `before` is the number of earlier positions of each
    source.
    """

    start: int
    lanes: Interleave
    before: tuple[int, ...]


class Places:
    """The sources of an infinite sequence of positions, in constant memory.

    Args:
        phases: the first position of each phase, ascending from 0, and the integer weights of all sources in it.
        limits: how often each source may come, None for no limit. When one is used up, the others share its places in
            their proportions.

    Attributes:
        size: number of positions; None if unlimited.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]], limits: Sequence[int | None]) -> None:
        self._stretches, self.size = _stretches(phases, limits)
        self._starts = [stretch.start for stretch in self._stretches]

    def at(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and how many samples of that source come before; int64."""
        which = np.searchsorted(self._starts, position, side="right") - 1
        source = np.zeros_like(position)
        number = np.zeros_like(position)
        for index in np.unique(which):
            mine = which == index
            stretch = self._stretches[index]
            source[mine], count = stretch.lanes.at(position[mine] - stretch.start)
            number[mine] = np.array(stretch.before, dtype=np.int64)[source[mine]] + count
        return source, number

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source come before `position`."""
        stretch = self._stretches[int(np.searchsorted(self._starts, position, side="right")) - 1]
        counts = stretch.lanes.counts(position - stretch.start)
        return [before + count for before, count in zip(stretch.before, counts, strict=True)]

    def changes(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the positions at which the weights change, with the new weights."""
        return [(stretch.start, stretch.lanes.weights) for stretch in self._stretches]


def _stretches(
    phases: Sequence[tuple[int, Sequence[int]]], limits: Sequence[int | None]
) -> tuple[list[_Stretch], int | None]:
    """Return the phases, each cut where a source reaches its limit, and the position where no source is left; None if
    that never happens.
    """
    stretches: list[_Stretch] = []
    before = [0] * len(limits)
    ends = [*(start for start, _ in phases[1:]), None]
    for (start, weights), end in zip(phases, ends, strict=True):
        while end is None or start < end:
            open_weights = [
                w if n is None or done < n else 0 for w, done, n in zip(weights, before, limits, strict=True)
            ]
            if not any(open_weights):
                return stretches, start
            lanes = Interleave(open_weights)
            stops = [
                lanes.reach(source, limit - before[source])
                for source, limit in enumerate(limits)
                if limit is not None and open_weights[source]
            ]
            stretches.append(_Stretch(start, lanes, tuple(before)))
            stop = min([start + count for count in stops] + ([] if end is None else [end]), default=None)
            if stop is None:
                return stretches, None
            before = [a + b for a, b in zip(before, lanes.counts(stop - start), strict=True)]
            start = stop
    return stretches, None

"""The places of sources in a mixture: which source comes at each position, and how often it came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.data.samples.mixture.interleave import Interleave


@dataclass(frozen=True)
class _Stretch:
    """Positions from `start` on are interleaved by `lanes`; `before` of each source came earlier."""

    start: int
    lanes: Interleave
    before: tuple[int, ...]


class Places:
    """The sources of an infinite sequence of positions, in constant memory.

    Args:
        phases: the first position of each, ascending from 0, and the whole weights of all sources in it.
        limits: how often each source comes at most, None for any number; the others then share its places in their
            proportions.

    Attributes:
        size: how many positions there are, None for any number.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]], limits: Sequence[int | None]) -> None:
        self._stretches, self.size = _stretches(phases, limits)
        self._starts = [stretch.start for stretch in self._stretches]

    def at(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how many of its samples come before; int64."""
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
        """How many samples of each source come before `position`."""
        stretch = self._stretches[int(np.searchsorted(self._starts, position, side="right")) - 1]
        counts = stretch.lanes.counts(position - stretch.start)
        return [before + count for before, count in zip(stretch.before, counts, strict=True)]

    def changes(self) -> list[tuple[int, tuple[int, ...]]]:
        """The positions from which on other weights hold, and these."""
        return [(stretch.start, stretch.lanes.weights) for stretch in self._stretches]


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

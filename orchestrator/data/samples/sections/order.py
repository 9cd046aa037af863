"""The order of samples by sections: a pure function of (seed, epoch, position). A position depends only on the
sections up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from orchestrator.config.errors import InputError
from orchestrator.data.samples.order import permute


class _Section(NamedTuple):
    start: int
    """The first position of the section in an epoch."""
    first: np.ndarray
    """The index of the first sample of each source, int64."""
    counts: np.ndarray
    """Number of samples of each source."""
    ends: np.ndarray
    """Cumulative number of positions up to each source."""


class SectionedOrder:
    """The infinite sequence of samples over weighted sources, section after section.

    An epoch goes through the sections in order. In each section, weight x samples of every source are shuffled
    together. A sample id is index x sources + source, which does not depend on the amount of text. As in
    `data.samples.order.Order`, a fractional weight takes the next part of a section's samples in each epoch, and
    `turn` is the number of the pass over them. Not thread-safe.

    Args:
        seed: determines the order.
        sections: number of sections.
        ends: returns the number of samples of each source up to the end of a section; may wait until it is known.
        weights: passes over each source in one epoch.

    `at` raises InputError if an epoch has no sample of a source, and whatever `ends` raises.
    """

    def __init__(
        self, seed: int, sections: int, ends: Callable[[int], Sequence[int]], weights: Sequence[float]
    ) -> None:
        self.seed = seed
        self._count = sections
        self._ends = ends
        self._weights = [Fraction(str(weight)) for weight in weights]
        self._sections: list[_Section] = []
        self._positions_known = 0  # positions of an epoch in the sections so far
        self._before = [0] * len(weights)

    @property
    def samples(self) -> list[int]:
        """Number of samples of each source. Waits for all sections."""
        self._reach(None)
        return list(self._before)

    @property
    def epoch_size(self) -> int:
        """Number of positions of an epoch. Waits for all sections."""
        self._reach(None)
        return self._positions_known

    def at(self, position: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return (turn, sample id) at each global `position`, both int64 of its shape."""
        position = np.asarray(position, dtype=np.int64)
        flat = position.ravel()
        if not flat.size or self._reach(int(flat.max())):
            epoch = np.zeros_like(flat)
            in_epoch = flat
        else:
            epoch, in_epoch = np.divmod(flat, self._positions_known)
        which = np.searchsorted([section.start for section in self._sections], in_epoch, side="right") - 1
        pass_number = np.zeros_like(flat)
        sample = np.zeros_like(flat)
        for number in np.unique(which):
            mine = which == number
            pass_number[mine], sample[mine] = self._within(int(number), epoch[mine], in_epoch[mine])
        return pass_number.reshape(position.shape), sample.reshape(position.shape)

    def drawn(self, position: int) -> list[int]:
        """Return how many samples of each source come before `position`. Within a section, counts are proportional."""
        totals = np.zeros(len(self._weights), dtype=np.int64)
        epoch, in_epoch = (0, position) if self._reach(position) else divmod(position, self._positions_known)
        for section in self._sections:
            counts = np.diff(section.ends, prepend=0)
            size = int(section.ends[-1])
            reached = min(max(in_epoch - section.start, 0), size)
            totals += epoch * counts + (reached * counts // size if size else 0)
        return [int(count) for count in totals]

    def _within(self, number: int, epoch: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `at`, for positions within one section."""
        start, first, counts, ends = self._sections[number]
        key = epoch * self._count + number
        drawn = permute(position - start, key, int(ends[-1]), self.seed)
        source = np.searchsorted(ends, drawn, side="right")
        drawn_count = np.diff(ends, prepend=0)[source]
        available = counts[source]
        index = (epoch * drawn_count) % available + drawn - (ends[source] - drawn_count)
        pass_number = (epoch * drawn_count) // available + index // available
        return pass_number, (first[source] + index % available) * len(ends) + source

    def _reach(self, position: int | None) -> bool:
        """Load the sections up to that of a position, all of them for None. Return whether it is in the first epoch."""
        while len(self._sections) < self._count and (position is None or position >= self._positions_known):
            ends = [int(end) for end in self._ends(len(self._sections))]
            counts = [
                int(weight * end) - int(weight * before)
                for weight, end, before in zip(self._weights, ends, self._before, strict=True)
            ]
            first = np.array(self._before, dtype=np.int64)
            last = np.array(ends, dtype=np.int64)
            section = _Section(self._positions_known, first, last - first, np.cumsum(counts, dtype=np.int64))
            self._positions_known = self._positions_known + sum(counts)
            self._before = ends
            self._sections.append(section)
            if len(self._sections) == self._count:
                self._refuse_empty()
        return position is not None and position < self._positions_known

    def _refuse_empty(self) -> None:
        """Raise InputError if an epoch has no sample of a source."""
        for number, (weight, count) in enumerate(zip(self._weights, self._before, strict=True)):
            if int(weight * count) == 0:
                problem = f"weight {float(weight):g} of {count} samples gives none in an epoch"
                hint = "raise it, give more text, or leave the source out"
                raise InputError(problem, f"data.sources.{number}", hint)

"""The order of samples by sections: a pure function of (seed, epoch, position), of which a position needs no more than
the sections up to its own."""

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
    """Samples of each source."""
    ends: np.ndarray
    """Positions up to each source, cumulated."""


class SectionedOrder:
    """The infinite sequence of samples over weighted sources, section after section.

    An epoch is one section after the other; in each, weight x samples of every source are shuffled together. Sample ids
    are index x sources + source, which do not depend on how much text there is. As in `data.samples.order.Order`
    a fractional weight takes the next part of a section's samples in each epoch, and the turn is the number of the
    pass over them. For one thread at a time.

    Args:
        seed: determines the order.
        sections: how many there are.
        ends: the number of samples of each source up to the end of a section; may wait until that is known.
        weights: passes over each source in one epoch.

    `at` raises InputError where an epoch has no sample of a source, and what `ends` raises.
    """

    def __init__(
        self, seed: int, sections: int, ends: Callable[[int], Sequence[int]], weights: Sequence[float]
    ) -> None:
        self.seed = seed
        self._count = sections
        self._ends = ends
        self._weights = [Fraction(str(weight)) for weight in weights]
        self._sections: list[_Section] = []
        self._known = 0  # positions of an epoch in the sections so far
        self._before = [0] * len(weights)

    @property
    def samples(self) -> list[int]:
        """Samples of each source; waits for all of them."""
        self._reach(None)
        return list(self._before)

    @property
    def epoch_size(self) -> int:
        """Positions of an epoch; waits for all samples."""
        self._reach(None)
        return self._known

    def at(self, position: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """(turn, sample id) at each global `position`, both int64 of its shape."""
        position = np.asarray(position, dtype=np.int64)
        flat = position.ravel()
        if not flat.size or self._reach(int(flat.max())):
            epoch = np.zeros_like(flat)
            place = flat
        else:
            epoch, place = np.divmod(flat, self._known)
        which = np.searchsorted([section.start for section in self._sections], place, side="right") - 1
        turn = np.zeros_like(flat)
        sample = np.zeros_like(flat)
        for number in np.unique(which):
            mine = which == number
            turn[mine], sample[mine] = self._within(int(number), epoch[mine], place[mine])
        return turn.reshape(position.shape), sample.reshape(position.shape)

    def drawn(self, position: int) -> list[int]:
        """How many samples of each source come before `position`; within a section by their proportion of it."""
        found = np.zeros(len(self._weights), dtype=np.int64)
        epoch, place = (0, position) if self._reach(position) else divmod(position, self._known)
        for section in self._sections:
            taken = np.diff(section.ends, prepend=0)
            size = int(section.ends[-1])
            reached = min(max(place - section.start, 0), size)
            found += epoch * taken + (reached * taken // size if size else 0)
        return [int(count) for count in found]

    def _within(self, number: int, epoch: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `at`, for places of one section."""
        start, first, counts, ends = self._sections[number]
        key = epoch * self._count + number
        drawn = permute(place - start, key, int(ends[-1]), self.seed)
        source = np.searchsorted(ends, drawn, side="right")
        taken = np.diff(ends, prepend=0)[source]
        there = counts[source]
        index = (epoch * taken) % there + drawn - (ends[source] - taken)
        turn = (epoch * taken) // there + index // there
        return turn, (first[source] + index % there) * len(ends) + source

    def _reach(self, position: int | None) -> bool:
        """Find the sections up to that of a position, all of them for None; whether it is in the first epoch."""
        while len(self._sections) < self._count and (position is None or position >= self._known):
            ends = [int(end) for end in self._ends(len(self._sections))]
            taken = [
                int(weight * end) - int(weight * before)
                for weight, end, before in zip(self._weights, ends, self._before, strict=True)
            ]
            first = np.array(self._before, dtype=np.int64)
            last = np.array(ends, dtype=np.int64)
            made = _Section(self._known, first, last - first, np.cumsum(taken, dtype=np.int64))
            self._known = self._known + sum(taken)
            self._before = ends
            self._sections.append(made)
            if len(self._sections) == self._count:
                self._refuse_empty()
        return position is not None and position < self._known

    def _refuse_empty(self) -> None:
        """Raise InputError if an epoch has no sample of a source."""
        for number, (weight, count) in enumerate(zip(self._weights, self._before, strict=True)):
            if int(weight * count) == 0:
                what = f"weight {float(weight):g} of {count} samples takes none into an epoch"
                hint = "raise it, give more text, or leave the source out"
                raise InputError(what, f"data.sources.{number}", hint)

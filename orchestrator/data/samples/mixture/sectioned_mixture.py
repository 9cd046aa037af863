"""The order of samples of a mixture by sections: a pure function of (seed, position). During the first pass over a
source, a position depends only on the sections up to its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from orchestrator.config.errors import InputError
from orchestrator.data.samples.mixture.mixed_order import limits_of, past_the_end, seed_of
from orchestrator.data.samples.mixture.places import Places
from orchestrator.data.samples.order import permute


class SectionedMixture:
    """The sequence of samples over sources in given proportions, where each source is read section after section.

    Like `MixedOrder`, but a pass over a source goes through its sections in order and shuffles the samples within
    each. A sample id is index x sources + source, as in `SectionedOrder`. The source at a position does not depend on
    the amount of text until a source has used up its passes, which cannot happen while it is read for the first time.
    Not thread-safe.

    Args:
        seed: determines the order.
        sections: number of sections.
        ends: returns the number of samples of each source up to the end of a section; may wait until it is known.
        phases: the first position of each phase, ascending from 0, and the integer weights of all sources in it.
        most: maximum passes over each source, at least 1; None for no limit.

    `at` raises InputError beyond the end of the order and for a source without samples, and whatever `ends` raises.
    """

    def __init__(
        self,
        seed: int,
        sections: int,
        ends: Callable[[int], Sequence[int]],
        phases: Sequence[tuple[int, Sequence[int]]],
        max_passes: Sequence[Fraction | None] = (),
    ) -> None:
        self.seed = seed
        self._count = sections
        self._ends = ends
        self._phases = phases
        sources = len(phases[0][1])
        self._most = list(max_passes) or [None] * sources
        self._bounds = np.zeros((1, sources), np.int64)
        """Cumulative samples of each source at the start, and at the end of each known section."""
        self._places = Places(phases, [None] * sources)
        self._seeds = [seed_of(seed, number) for number in range(sources)]

    @property
    def samples(self) -> list[int]:
        """Number of samples of each source. Waits for all sections."""
        self._reach(None)
        return [int(count) for count in self._bounds[-1]]

    @property
    def size(self) -> int | None:
        """Number of positions; None if unlimited. Waits for all sections."""
        self._reach(None)
        return self._places.size

    def at(self, position: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return (turn, sample id) at each global `position`, int64 of its shape. The turn is the pass over the
        source.
        """
        position = np.asarray(position, dtype=np.int64)
        flat = position.ravel()
        if not flat.size:
            return np.zeros_like(position), np.zeros_like(position)
        if not self.has(int(flat.max()) + 1):
            raise past_the_end(self._places.size or 0)
        is_all_known = self._reach(int(flat.max()))
        source, number = self._places.at(flat)
        pass_number = np.zeros_like(flat)
        sample = np.zeros_like(flat)
        for which in np.unique(source):
            mine = source == which
            pass_number[mine], sample[mine] = self._in_source(
                int(which), number[mine], self._bounds[:, which], is_all_known
            )
        return pass_number.reshape(position.shape), (sample * len(self._seeds) + source).reshape(
            position.shape
        )

    def has(self, positions: int) -> bool:
        """Return whether the order has so many positions. Waits for no sections but theirs, unlike `size`."""
        is_all_known = self._reach(positions - 1)
        return not is_all_known or self._places.size is None or positions <= self._places.size

    def drawn(self, position: int) -> list[int]:
        """Return how many samples of each source come before `position`."""
        self._reach(position)
        return self._places.counts(position)

    def changes(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the positions at which the weights change, with the new weights. Waits for all sections."""
        self._reach(None)
        return self._places.changes()

    def _in_source(
        self, source: int, number: np.ndarray, bounds: np.ndarray, is_all_known: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the pass and the index of the `number`-th samples of one source, int64."""
        pass_number, position = (
            np.divmod(number, bounds[-1]) if is_all_known else (np.zeros_like(number), number)
        )
        section = np.searchsorted(bounds, position, side="right") - 1
        index = np.zeros_like(position)
        for which in np.unique(section):
            mine = section == which
            first = bounds[which]
            key = pass_number[mine] * self._count + which
            size = int(bounds[which + 1] - first)
            index[mine] = first + permute(position[mine] - first, key, size, self._seeds[source])
        return pass_number, index

    def _reach(self, position: int | None) -> bool:
        """Load as many sections as the positions up to this one need, all of them for None. Return whether all are
        loaded.
        """
        while len(self._bounds) <= self._count and not self._holds(position):
            self._bounds = np.vstack([self._bounds, [self._ends(len(self._bounds) - 1)]])
            if len(self._bounds) > self._count:
                self._refuse_empty()
                self._places = Places(self._phases, limits_of(self._most, self.samples))
        return len(self._bounds) > self._count

    def _holds(self, position: int | None) -> bool:
        """Return whether every source has more known samples than come up to a position. Then no source is read
        again, and none has used up its passes.
        """
        if position is None:
            return False
        counts = self._places.counts(position + 1)
        return all(count < available for count, available in zip(counts, self._bounds[-1], strict=True))

    def _refuse_empty(self) -> None:
        for number in np.flatnonzero(self._bounds[-1] == 0):
            hint = "give more text, leave the source out, or lower data.sequence_length"
            raise InputError("has no sample", f"data.sources.{number}", hint)

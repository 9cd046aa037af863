"""The order of samples of a mixture: a pure function of (seed, position), in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from orchestrator.config.errors import InputError
from orchestrator.data.samples.mixture.places import Places
from orchestrator.data.samples.order import mix, permute


class MixedOrder:
    """The sequence of samples over sources in given proportions.

    A mixture has no epochs: each source is read in its own passes. A pass reads every sample once, in a new random
    order. The n-th sample of a source is number n modulo its size of pass n / size, and n follows from the position
    (see `Interleave`). A source that has used up its passes no longer appears; the others then share its places in
    their proportions.

    Args:
        seed: determines the order.
        samples: number of samples of each source, at least 1.
        phases: the first position of each phase, ascending from 0, and the integer weights of all sources in it.
        most: maximum passes over each source; None for no limit.
    """

    def __init__(
        self,
        seed: int,
        samples: Sequence[int],
        phases: Sequence[tuple[int, Sequence[int]]],
        max_passes: Sequence[Fraction | None] = (),
    ) -> None:
        self.seed = seed
        self.samples = list(samples)
        self._places = Places(phases, limits_of(max_passes, samples))
        self._offsets = np.cumsum(self.samples) - self.samples
        self._seeds = [seed_of(seed, n) for n in range(len(samples))]

    @property
    def size(self) -> int | None:
        """Number of positions; None if unlimited."""
        return self._places.size

    def at(self, position: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return (turn, sample id) at each global `position`, as `Order.at`. The turn is the pass over the sample's
        source.

        Raises InputError beyond the end of the order, see `size`.
        """
        position = np.asarray(position, dtype=np.int64)
        if self.size is not None and position.size and int(position.max()) >= self.size:
            raise past_the_end(self.size)
        source, number = self._places.at(position.ravel())
        pass_number = np.zeros_like(number)
        sample = np.zeros_like(number)
        for which in np.unique(source):
            mine = source == which
            size = self.samples[which]
            pass_number[mine], index = np.divmod(number[mine], size)
            sample[mine] = self._offsets[which] + permute(index, pass_number[mine], size, self._seeds[which])
        return pass_number.reshape(position.shape), sample.reshape(position.shape)

    def has(self, positions: int) -> bool:
        """Return whether the order has so many positions."""
        return self.size is None or positions <= self.size

    def drawn(self, position: int) -> list[int]:
        """Return how many samples of each source come before `position`."""
        return self._places.counts(position)

    def changes(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the positions at which the weights change, with the new weights."""
        return self._places.changes()


def past_the_end(size: int) -> InputError:
    """Return the error for a position beyond the end of an order."""
    problem = f"all sources reach max_passes after {size} samples"
    return InputError(problem, "data.sources", "raise max_passes, or train for fewer steps")


def limits_of(max_passes: Sequence[Fraction | None], samples: Sequence[int]) -> list[int | None]:
    """Return how often sources of these sizes may come, given their maximum passes."""
    return [
        None if passes is None else int(passes * count)
        for passes, count in zip(max_passes or [None] * len(samples), samples, strict=True)
    ]


def seed_of(seed: int, source: int) -> int:
    """Return a separate seed for a source, so that sources of one size are shuffled differently."""
    return int(mix(mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(source + 1))[0])

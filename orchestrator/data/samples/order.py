"""The order of samples: a pure function of (seed, epoch, position), in constant memory.

A keyed permutation replaces a shuffled list: position p of an epoch is sample permute(p). Any rank finds any sample
of any step with a few multiplications. This module keeps no state. The position is a field of
`orchestrator.train.training_progress.TrainingProgress`, which every commit stores, so a resume replays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from orchestrator.config.errors import InputError

ROUNDS = 6
"""Pairs of Feistel rounds. Three are enough to look random; the others cost microseconds."""


class Order:
    """The infinite sequence of samples over weighted sources.

    An epoch takes floor(weight x samples) of each source, all shuffled together. With a fractional weight, each epoch
    takes the next part of the source. A sample's randomness depends on its pass over the source (`turn` in the code),
    so that no two passes are equal.

    Args:
        seed: determines the order.
        samples: number of samples of each source.
        weights: passes over each source in one epoch.
        by_pass: False for data of format 1. The pass is then the number of the epoch, and a source may be empty.

    Raises InputError if a source or an epoch would be empty.
    """

    def __init__(
        self, seed: int, samples: Sequence[int], weights: Sequence[float], by_pass: bool = True
    ) -> None:
        # use the decimal that the user wrote, not the nearest binary fraction: 0.29 of 100 samples is 29
        self.counts = [math.floor(Fraction(str(w)) * n) for w, n in zip(weights, samples, strict=True)]
        self.epoch_size = sum(self.counts)
        if self.epoch_size == 0:
            raise InputError(
                f"an epoch over {sum(samples)} samples with weights {list(weights)} gives none",
                "data.sources",
                "raise the weights or give more text",
            )
        for number, count in enumerate(self.counts):
            if by_pass and not count:
                raise InputError(
                    f"weight {weights[number]} of {samples[number]} samples gives none in an epoch",
                    f"data.sources.{number}.weight",
                    "raise it, or leave the source out",
                )
        self.seed = seed
        self._by_pass = by_pass
        self.samples = list(samples)
        self._samples = np.array(samples, dtype=np.int64)
        self._counts = np.array(self.counts, dtype=np.int64)
        self._ends = np.cumsum(self._counts)
        self._offsets = np.cumsum(self._samples) - self._samples

    def at(self, position: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return (turn, sample id) at each global `position`, both int64 of its shape.

        Sample ids number the samples of all sources, one source after the other.
        """
        position = np.asarray(position, dtype=np.int64)
        epoch, index = np.divmod(position, self.epoch_size)
        drawn = permute(index, epoch, self.epoch_size, self.seed)
        source = np.searchsorted(self._ends, drawn, side="right")
        counts = self._counts[source]
        samples = self._samples[source]
        within = drawn - (self._ends[source] - counts)
        # Python integers, because the product may exceed 2^63 after many epochs of a large source.
        passes = (epoch.astype(object) * counts) // samples
        start = (epoch.astype(object) * counts) % samples
        index = within + start.astype(np.int64)
        pass_number = passes.astype(np.int64) + index // samples if self._by_pass else epoch
        return pass_number, self._offsets[source] + index % samples

    def drawn(self, position: int) -> list[int]:
        """Return how many samples of each source come before `position`. Within an epoch, counts are proportional."""
        return [position * count // self.epoch_size for count in self.counts]


def permute(index: ArrayLike, epoch: ArrayLike, size: int, seed: int) -> np.ndarray:
    """Return the image of each `index` of [0, size) under the permutation keyed by (seed, epoch); int64.

    A generalised Feistel network over [0, a) x [0, b) with a x b just above `size`, repeated until the result is
    below `size` (Black and Rogaway, 2002, "Ciphers with arbitrary finite domains", methods 2 and 3).
    """
    index, epoch = np.broadcast_arrays(np.asarray(index, dtype=np.int64), np.asarray(epoch, dtype=np.int64))
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    image = index.astype(np.uint64).ravel()
    key = mix(mix(np.array(seed % 2**64, dtype=np.uint64)) ^ epoch.astype(np.uint64).ravel())
    outside = np.arange(image.size)
    while outside.size:
        image[outside] = _feistel(image[outside], key[outside], width, height)
        outside = outside[image[outside] >= size]
    return image.astype(np.int64).reshape(index.shape)


def _feistel(position: np.ndarray, key: np.ndarray, width: int, height: int) -> np.ndarray:
    """Apply one pass of a permutation of [0, width x height). Each half-round adds a hash of the other half."""
    a = np.uint64(width)
    b = np.uint64(height)
    high, low = np.divmod(position, a)
    for number in range(ROUNDS):
        key = mix(key + np.uint64(number))
        low = (low + mix(key ^ high) % a) % a
        high = (high + mix(key + low) % b) % b
    return high * a + low


def mix(value: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 step, a bijection of 64-bit words (Steele, Lea and Flood, 2014; Stafford's mix 13)."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))

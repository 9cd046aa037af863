"""Samples made by a function, for batches that do not come from a corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Samples:
    """`size` samples, each a separate document; implements `workloads.workload.Text`."""

    read: Callable[[int], np.ndarray]
    size: int

    def __call__(self, sample: int) -> np.ndarray:
        """See `Text`."""
        return self.read(sample)

    def __len__(self) -> int:
        return self.size

    def siblings(self, sample: int) -> range:
        """See `Text`."""
        return range(sample, sample + 1)

    def companions(self, sample: int) -> range:
        """See `Text`."""
        return range(len(self))

"""Samples that a function gives, for batches that are of no corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Samples:
    """`size` samples, each of a document of its own, as objectives read them; see `workloads.workload.Text`."""

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

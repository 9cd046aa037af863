"""The samples of a run in the order in which its steps first read them, in parts.

What is computed for each sample while a run trains is computed in this order. The parts are a pure function of the
order, of the number of positions that the run reads, and of the size of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.mixture.passes import AnyOrder

AT_ONCE = 2**20
"""Positions that are looked at together."""


class FirstUse:
    """The parts of the samples that the positions of an order need, by first use.

    Attributes:
        parts: the sample numbers of each part, int64.
    """

    def __init__(self, order: AnyOrder, samples: int, positions: int, size: int) -> None:
        """Find the parts.

        Args:
            order: the order of samples.
            samples: the number of samples.
            positions: positions of the order that are read, from the first on.
            size: samples of a part; the last one may have fewer.
        """
        self._slots = np.full(samples, -1, np.int64)
        """For each sample, its place in the order of first use; -1 if no position has it."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self._first_uses(order, positions)])
        self._size = size
        self.parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]

    def _first_uses(self, order: AnyOrder, positions: int) -> Iterator[np.ndarray]:
        """Yield the samples that stretches of positions use first, and number them."""
        found = 0
        if isinstance(order, MixedOrder) and order.size is not None:
            positions = min(positions, order.size)
        for start in range(0, positions, AT_ONCE):
            if found == len(self._slots):
                return
            _, numbers = order.at(np.arange(start, min(start + AT_ONCE, positions)))
            numbers %= len(self._slots)
            distinct, first = np.unique(numbers, return_index=True)
            is_new = self._slots[distinct] < 0
            new = distinct[is_new][np.argsort(first[is_new])]
            self._slots[new] = np.arange(found, found + len(new))
            found += len(new)
            yield new

    def place(self, sample: int) -> tuple[int, int] | None:
        """Return the number of a sample's part and its index there; None if no position has it."""
        slot = int(self._slots[sample])
        return divmod(slot, self._size) if slot >= 0 else None

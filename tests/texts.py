"""Samples for objectives that ask for more than their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Corpus:
    """The samples that `read` gives by number, `size` of them; those of a document are `per_document` in a row."""

    def __init__(self, read: Callable[[int], np.ndarray], size: int = 2**41, per_document: int = 1) -> None:
        self._read, self._size, self._per_document = read, size, per_document

    def __call__(self, sample: int) -> np.ndarray:
        """The tokens of a sample."""
        return self._read(sample)

    def __len__(self) -> int:
        return self._size

    def siblings(self, sample: int) -> range:
        """The samples of the same document."""
        first = sample - sample % self._per_document
        return range(first, min(first + self._per_document, self._size))

    def companions(self, sample: int) -> range:
        """All samples."""
        return range(len(self))

"""The samples of a source that are packed by best fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.data.samples.packing.index import PackingIndex


@dataclass(frozen=True)
class PackedWindows:
    """Samples of whole documents, and of windows of longer ones; implements `Windows`."""

    index: PackingIndex

    @property
    def documents(self) -> int | None:
        """See `Windows`."""
        return int(self.index.facts["documents"])

    @property
    def tokens(self) -> int:
        """See `Windows`."""
        return int(self.index.facts["tokens"])

    def __len__(self) -> int:
        return len(self.index)

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        return self.index.pieces(sample)

    def siblings(self, sample: int) -> range:
        """See `Windows`. Not available: a sample has several documents."""
        raise NotImplementedError

    def companions(self, sample: int) -> range:
        """See `Windows`. Not available: the objectives that ask read documents."""
        raise NotImplementedError

"""The positions of samples in a source's stream of tokens, as an objective reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from orchestrator.data.samples.listed_windows import listed_windows
from orchestrator.data.samples.packing.index import open_index
from orchestrator.data.samples.packing.windows import PackedWindows
from orchestrator.data.store.manifest import DataManifest

if TYPE_CHECKING:
    from workloads.workload import Reading

MANY = 2**20
"""Documents of data whose index is kept on a node's disk."""


class Streams(Protocol):
    """What is read of prepared data: a stream of tokens of each source, as in `data.store.tokens.Tokens`."""

    @property
    def manifest(self) -> DataManifest:
        """That of the prepared data."""

    @property
    def sources(self) -> int:
        """Number of sources."""

    def length(self, source: int) -> int:
        """Number of tokens of a source."""

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of a source, int64."""

    @property
    def at_once(self) -> int:
        """How many windows are best read at once."""

    def document_ends(self, source: int) -> np.ndarray:
        """The index after the closing token of each document of a source, int64 [documents], ascending."""

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """The same in parts."""

    @property
    def digest(self) -> str:
        """Streams of equal digests have the same tokens and documents."""

    @property
    def derived(self) -> Path:
        """The folder on this node's disk for what is derived from the data."""


class StreamsOf:
    """A base of streams that are made of others: what does not depend on which tokens they have."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    @property
    def manifest(self) -> DataManifest:
        """That of the prepared data, of which these are a part."""
        return self._streams.manifest

    @property
    def sources(self) -> int:
        """See `Streams`."""
        return self._streams.sources

    @property
    def at_once(self) -> int:
        """See `Streams`."""
        return self._streams.at_once

    @property
    def derived(self) -> Path:
        """See `Streams`."""
        return self._streams.derived

    def document_ends(self, source: int) -> np.ndarray:
        """See `Streams`."""
        return np.concatenate([np.zeros(0, np.int64), *self.document_ends_by_part(source)])

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Streams`."""
        raise NotImplementedError


class Windows(Protocol):
    """Where the samples 0, 1, ... of one source are."""

    @property
    def documents(self) -> int | None:
        """Number of documents; None if it is unknown."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples together."""

    def __len__(self) -> int:
        """Number of samples."""

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """The index of the first token of each piece of the stream that a sample has, and its number of tokens."""

    def siblings(self, sample: int) -> range:
        """The samples of the same document."""

    def companions(self, sample: int) -> range:
        """The samples that may be read along with one."""


@dataclass(frozen=True)
class TiledWindows:
    """A window every `stride` tokens of a stream of `length` tokens, regardless of documents. With `whole` a last one
    is shorter where full windows leave tokens over; it has two tokens at least."""

    length: int
    reading: Reading
    whole: bool = False
    documents: int | None = None

    def __len__(self) -> int:
        window, stride = self.reading.window, self.reading.stride
        full = max(0, (self.length - window) // stride + 1)
        covered = (full - 1) * stride + window if full else 0
        return full + (self.whole and self.length > covered and self.length - full * stride > 1)

    @property
    def tokens(self) -> int:
        """See `Windows`."""
        count = len(self)
        return (count - 1) * self.reading.window + self.at(count - 1)[1] if count else 0

    def at(self, sample: int) -> tuple[int, int]:
        """The index of a sample's first token, and its number of tokens."""
        start = sample * self.reading.stride
        return start, min(self.reading.window, self.length - start)

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        return (self.at(sample),)

    def siblings(self, sample: int) -> range:
        """See `Windows`. Not available: documents are not considered."""
        raise NotImplementedError

    def companions(self, sample: int) -> range:
        """See `Windows`. Not available: the objectives that ask read documents."""
        raise NotImplementedError


def windows_of(tokens: Streams, source: int, reading: Reading, whole: bool = False) -> Windows:
    """The samples of a source; with `whole`, to its last token where the objective takes a shorter window.

    Raises DamagedShard if the index of its documents is damaged.
    """
    if reading.unit == "stream":
        return TiledWindows(tokens.length(source), reading, whole and reading.partial)
    ends = tokens.document_ends_by_part(source)
    if tokens.manifest.documents > MANY:
        return listed_windows(ends, reading, source, tokens.digest, tokens.derived)
    return listed_windows(ends, reading, source)


def packed_windows(tokens: Streams, source: int, reading: Reading) -> PackedWindows:
    """The samples of a source's stream, packed by best fit. Raises DamagedShard as `windows_of`."""
    ends = tokens.document_ends_by_part(source)
    index = open_index(tokens.derived, tokens.digest, source, ends, reading.window, reading.stride)
    return PackedWindows(index)

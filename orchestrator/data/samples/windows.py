"""The positions of samples in a source's token stream, as an objective reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from orchestrator.data.samples.packing.best_fit import PackingIndex, open_index
from orchestrator.data.store.derived_arrays import Keep, arrays_in_memory, arrays_on_disk
from orchestrator.data.store.manifest import DataManifest

if TYPE_CHECKING:
    from workloads.workload import Windowing


FORMAT = 1
NAMES = ("starts", "stops", "ends")


@dataclass(frozen=True)
class ListedWindows:
    """Samples [starts[i], stops[i]), listed one by one.

    Attributes:
        starts, stops: int64 [samples], ascending.
        ends: the ends of the documents, int64.
        documents: number of documents that have a sample.
        tokens: number of tokens of all samples together.
    """

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray
    documents: int
    tokens: int

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, sample: int) -> tuple[int, int]:
        """Return the index of a sample's first token, and its number of tokens."""
        return int(self.starts[sample]), int(self.stops[sample] - self.starts[sample])

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        return (self.at(sample),)

    def siblings(self, sample: int) -> range:
        """See `Windows`."""
        document = int(np.searchsorted(self.ends, self.starts[sample], side="right"))
        bounds = (int(self.ends[document - 1]) if document else 0, int(self.ends[document]))
        first, last = np.searchsorted(self.starts, bounds)
        return range(int(first), int(last))

    def companions(self, sample: int) -> range:
        """See `Windows`."""
        return range(len(self))


def listed_windows(
    parts: Iterable[np.ndarray],
    windowing: Windowing,
    source: int,
    digest: str = "",
    derived: Path | None = None,
) -> ListedWindows:
    """Return the samples of a source, made from its documents.

    Args:
        parts: the ends of the documents, part by part.
        windowing: how the objective reads samples.
        source: number of the source.
        digest: digest of the data; the key of the files.
        derived: a folder on this node's disk to keep the result in. `parts` is then read only by the first caller.
    """

    def make(keep: Keep) -> dict[str, Any]:
        totals = {"documents": 0, "tokens": 0}
        for chunk in window_chunks(parts, windowing):
            for name in NAMES:
                keep(name, getattr(chunk, name))
            totals["documents"] += chunk.documents
            totals["tokens"] += int((chunk.stops - chunk.starts).sum())
        return totals

    if derived is None:
        arrays, totals = arrays_in_memory(NAMES, make)
    else:
        content = json.dumps([FORMAT, digest, windowing.unit, windowing.window]).encode()
        folder = derived / "windows" / xxhash.xxh3_128_hexdigest(content)
        arrays, totals = arrays_on_disk(folder, source, NAMES, make)
    return ListedWindows(arrays["starts"], arrays["stops"], arrays["ends"], **totals)


class _Listed(NamedTuple):
    """The next samples [starts, stops), the ends of their documents, and how many of these documents have a sample."""

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray
    documents: int


def window_chunks(parts: Iterable[np.ndarray], windowing: Windowing) -> Iterator[_Listed]:
    """Yield the samples of documents. `parts` holds the documents' ends, ascending int64; the division into parts
    does not affect the result.
    """
    cut = {"record": _records, "records": _full_records, "document": _parts, "documents": _full_documents}
    make = cut[windowing.unit]
    begin = 0
    pending = np.zeros(0, np.int64)
    for ends in chain(parts, [None]):
        pending = pending if ends is None else np.concatenate([pending, ends])
        if not len(pending):
            continue
        starts, stops, used = make(begin, pending, windowing.window, ends is None)
        documents = len(np.unique(np.searchsorted(pending, starts, side="right")))
        yield _Listed(starts, stops, pending[:used], documents)
        begin = int(pending[used - 1]) if used else begin
        pending = pending[used:]


Cut = tuple[np.ndarray, np.ndarray, int]
"""Samples [starts, stops), and how many of the documents they use up. The remaining documents may continue in the
next part.
"""


def _records(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Each document without its closing token."""
    return np.concatenate(([begin], ends[:-1])), ends - 1, len(ends)


def _parts(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Split each document, without its closing token, into the fewest parts of about equal size with at most `window`
    tokens.
    """
    begins = np.concatenate(([begin], ends[:-1]))
    sizes = ends - 1 - begins
    parts = -(-sizes // window)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    number = np.arange(len(first)) - first
    begins, sizes, parts = (np.repeat(value, parts) for value in (begins, sizes, parts))
    return begins + number * sizes // parts, begins + (number + 1) * sizes // parts, len(ends)


def _full_documents(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Windows of as many consecutive whole documents as fit `window` tokens. A longer document is cut to its
    beginning.
    """
    starts = []
    stops = []
    document = 0
    while document < len(ends):
        after = int(np.searchsorted(ends, begin + window, side="right"))
        if after == len(ends) and not last:
            break
        starts.append(begin)
        stops.append(int(ends[after - 1]) if after > document else begin + window)
        document = max(after, document + 1)
        begin = int(ends[document - 1])
    return np.array(starts, np.int64), np.array(stops, np.int64), document


def _full_records(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Groups of as many consecutive whole records as have at most `window` tokens without their closing words. A
    longer record is alone.
    """
    tokens = ends - begin - np.arange(1, len(ends) + 1)  # tokens up to the end of each record
    firsts = []
    record = 0
    while record < len(ends):
        before = int(tokens[record - 1]) if record else 0
        after = max(int(np.searchsorted(tokens, before + window, side="right")), record + 1)
        if after == len(ends) and not last:
            break
        firsts.append(record)
        record = after
    first = np.array(firsts, np.int64)
    after_each = np.append(first[1:], record)[: len(first)]
    return np.where(first > 0, ends[first - 1], begin), ends[after_each - 1] - 1, record


@dataclass(frozen=True)
class PackedWindows:
    """Samples of whole documents, and of windows of longer documents; implements `Windows`."""

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
        """Not available: a sample has several documents. See `Windows`."""
        raise NotImplementedError

    def companions(self, sample: int) -> range:
        """Not available: the objectives that need it read documents. See `Windows`."""
        raise NotImplementedError


MANY = 2**20
"""From this number of documents on, the index is kept on a node's disk."""


class Streams(Protocol):
    """A view of prepared data: one token stream for each source, as in `data.store.tokens.Tokens`."""

    @property
    def manifest(self) -> DataManifest:
        """The manifest of the prepared data."""

    @property
    def sources(self) -> int:
        """Number of sources."""

    def length(self, source: int) -> int:
        """Return the number of tokens of a source."""

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) of a source, int64."""

    @property
    def at_once(self) -> int:
        """How many windows are best read in parallel."""

    def document_ends(self, source: int) -> np.ndarray:
        """Return the index after each document's closing token, int64 [documents], ascending."""

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """Yield the values of `document_ends` in parts."""

    @property
    def digest(self) -> str:
        """A digest of the content: streams with equal digests have the same tokens and documents."""

    @property
    def derived(self) -> Path:
        """The folder on this node's disk for files derived from the data."""


class StreamsOf:
    """Base class of streams that select or join other streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    @property
    def manifest(self) -> DataManifest:
        """The manifest of the prepared data that these streams are part of."""
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
    """The positions of the samples 0, 1, ... of one source."""

    @property
    def documents(self) -> int | None:
        """Number of documents; None if unknown."""

    @property
    def tokens(self) -> int:
        """Total number of tokens of all samples."""

    def __len__(self) -> int:
        """Number of samples."""

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """Return the pieces of the stream that make up a sample: first token and number of tokens of each."""

    def siblings(self, sample: int) -> range:
        """Return the samples of the same document."""

    def companions(self, sample: int) -> range:
        """Return the samples that may be read together with this one."""


@dataclass(frozen=True)
class TiledWindows:
    """A window every `stride` tokens of a stream of `length` tokens, regardless of document ends.

    With `whole`, the tokens left after the last full window form one shorter window of at least two tokens.
    """

    length: int
    windowing: Windowing
    include_partial: bool = False
    documents: int | None = None

    def __len__(self) -> int:
        window = self.windowing.window
        stride = self.windowing.stride
        full = max(0, (self.length - window) // stride + 1)
        covered = (full - 1) * stride + window if full else 0
        return full + (self.include_partial and self.length > covered and self.length - full * stride > 1)

    @property
    def tokens(self) -> int:
        """See `Windows`."""
        count = len(self)
        return (count - 1) * self.windowing.window + self.at(count - 1)[1] if count else 0

    def at(self, sample: int) -> tuple[int, int]:
        """Return the index of a sample's first token, and its number of tokens."""
        start = sample * self.windowing.stride
        return start, min(self.windowing.window, self.length - start)

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        return (self.at(sample),)

    def siblings(self, sample: int) -> range:
        """Not available: documents are not considered. See `Windows`."""
        raise NotImplementedError

    def companions(self, sample: int) -> range:
        """Not available: the objectives that need it read documents. See `Windows`."""
        raise NotImplementedError


def windows_of(tokens: Streams, source: int, windowing: Windowing, include_partial: bool = False) -> Windows:
    """Return the samples of a source.

    With `include_partial`, they reach the source's last token if the objective accepts a shorter window.

    Raises DamagedShard if the index of documents is damaged.
    """
    if windowing.unit == "stream":
        return TiledWindows(tokens.length(source), windowing, include_partial and windowing.partial)
    ends = tokens.document_ends_by_part(source)
    if tokens.manifest.documents > MANY:
        return listed_windows(ends, windowing, source, tokens.digest, tokens.derived)
    return listed_windows(ends, windowing, source)


def packed_windows(tokens: Streams, source: int, windowing: Windowing) -> PackedWindows:
    """Return the samples of a source, packed by best fit. Raises DamagedShard as `windows_of`."""
    ends = tokens.document_ends_by_part(source)
    index = open_index(
        tokens.derived,
        tokens.digest,
        source=source,
        ends=ends,
        window=windowing.window,
        stride=windowing.stride,
    )
    return PackedWindows(index)

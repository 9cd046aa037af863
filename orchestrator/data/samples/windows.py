"""The positions of samples in a source's stream of tokens, as an objective reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from orchestrator.data.samples.packing.index import PackingIndex, open_index
from orchestrator.data.store.derived_arrays import Keep, arrays_in_memory, arrays_on_disk
from orchestrator.data.store.manifest import DataManifest

if TYPE_CHECKING:
    from workloads.workload import Reading


FORMAT = 1
NAMES = ("starts", "stops", "ends")


@dataclass(frozen=True)
class ListedWindows:
    """Samples [starts[i], stops[i]), int64 [samples], ascending; documents end at `ends`, int64. `documents` of these
    have a sample; `tokens` is what all samples have together."""

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray
    documents: int
    tokens: int

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, sample: int) -> tuple[int, int]:
        """The index of a sample's first token, and its number of tokens."""
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
    parts: Iterable[np.ndarray], reading: Reading, source: int, digest: str = "", place: Path | None = None
) -> ListedWindows:
    """The samples of a source by its documents, whose ends come in `parts`. With a folder on this node's disk as
    `place` they are kept there, by the `digest` of the data, and `parts` is read only by the first who asks."""

    def make(keep: Keep) -> dict[str, Any]:
        told = {"documents": 0, "tokens": 0}
        for found in listed(parts, reading):
            for name in NAMES:
                keep(name, getattr(found, name))
            told["documents"] += found.documents
            told["tokens"] += int((found.stops - found.starts).sum())
        return told

    if place is None:
        arrays, told = arrays_in_memory(NAMES, make)
    else:
        content = json.dumps([FORMAT, digest, reading.unit, reading.window]).encode()
        folder = place / "windows" / xxhash.xxh3_128_hexdigest(content)
        arrays, told = arrays_on_disk(folder, source, NAMES, make)
    return ListedWindows(arrays["starts"], arrays["stops"], arrays["ends"], **told)


class _Listed(NamedTuple):
    """The next samples [starts, stops), the ends of the documents that they were made of, and how many of these have a
    sample."""

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray
    documents: int


def listed(parts: Iterable[np.ndarray], reading: Reading) -> Iterator[_Listed]:
    """The samples of documents whose ends come in parts, ascending int64; they do not depend on how these are cut."""
    cut = {"record": _records, "records": _full_records, "document": _parts, "documents": _full_documents}
    make = cut[reading.unit]
    begin = 0
    held = np.zeros(0, np.int64)
    for ends in chain(parts, [None]):
        held = held if ends is None else np.concatenate([held, ends])
        if not len(held):
            continue
        starts, stops, used = make(begin, held, reading.window, ends is None)
        documents = len(np.unique(np.searchsorted(held, starts, side="right")))
        yield _Listed(starts, stops, held[:used], documents)
        begin = int(held[used - 1]) if used else begin
        held = held[used:]


Cut = tuple[np.ndarray, np.ndarray, int]
"""Samples [starts, stops), and how many documents they are made of: of those after them more may follow."""


def _records(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Each document without its closing token."""
    return np.concatenate(([begin], ends[:-1])), ends - 1, len(ends)


def _parts(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Each document without its closing token, in the fewest parts of about equal size that have at most `window`
    tokens."""
    begins = np.concatenate(([begin], ends[:-1]))
    sizes = ends - 1 - begins
    parts = -(-sizes // window)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    number = np.arange(len(first)) - first
    begins, sizes, parts = (np.repeat(value, parts) for value in (begins, sizes, parts))
    return begins + number * sizes // parts, begins + (number + 1) * sizes // parts, len(ends)


def _full_documents(begin: int, ends: np.ndarray, window: int, last: bool) -> Cut:
    """Windows of as many full documents, in order, as fit `window` tokens; of a longer document, its beginning."""
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
    """As many full records, in order, as have `window` tokens together without their closing words; a longer one
    alone."""
    tokens = ends - begin - np.arange(1, len(ends) + 1)  # up to the end of each
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
        window = self.reading.window
        stride = self.reading.stride
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

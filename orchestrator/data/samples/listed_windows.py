"""Samples that are found by an index of documents: of much text, made once for a node and memory-mapped, so that what a
process holds does not grow with the documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from orchestrator.data.store.derived_arrays import Keep, arrays_in_memory, arrays_on_disk

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
    make, begin, held = cut[reading.unit], 0, np.zeros(0, np.int64)
    for ends in chain(parts, [None]):
        held = held if ends is None else np.concatenate([held, ends])
        if not len(held):
            continue
        starts, stops, used = make(begin, held, reading.window, ends is None)
        documents = len(np.unique(np.searchsorted(held, starts, side="right")))
        yield _Listed(starts, stops, held[:used], documents)
        begin, held = int(held[used - 1]) if used else begin, held[used:]


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
    starts, stops, document = [], [], 0
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
    firsts, record = [], 0
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

"""Some documents of prepared data, read as if there were no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from orchestrator.data.manifest import DataManifest
from orchestrator.data.windows import Streams


class Subset:
    """The streams of the chosen documents of each source, one after the other; implements `Streams`.

    Kept in memory are only the runs of documents that follow each other in the prepared data.
    """

    def __init__(self, streams: Streams, chosen: Sequence[np.ndarray]) -> None:
        """`chosen` has for each source a bool array [documents]."""
        self._streams = streams
        self.documents = sum(int(mask.sum()) for mask in chosen)
        self._runs = [_runs(streams.document_ends(number), mask) for number, mask in enumerate(chosen)]
        self._ends = [np.cumsum(stops - starts) for starts, stops in self._runs]
        self.tokens = sum(map(self.length, range(self.sources)))

    @property
    def manifest(self) -> DataManifest:
        """That of the prepared data, of which these documents are a part."""
        return self._streams.manifest

    @property
    def digest(self) -> str:
        """See `Tokens.digest`."""
        found = xxhash.xxh3_128(self._streams.digest.encode())
        for starts, stops in self._runs:
            found.update(np.concatenate(([len(starts)], starts, stops)).astype("<i8").tobytes())
        return found.hexdigest()

    @property
    def derived(self) -> Path:
        """See `Tokens.derived`."""
        return self._streams.derived

    @property
    def sources(self) -> int:
        """Number of sources."""
        return self._streams.sources

    def length(self, source: int) -> int:
        """Number of tokens of the chosen documents of a source."""
        return int(self._ends[source][-1]) if len(self._ends[source]) else 0

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """See `Tokens.window`."""
        ends, (_, stops) = self._ends[source], self._runs[source]
        stop = start + length
        if start < 0 or length < 0 or stop > self.length(source):
            raise IndexError(f"tokens {start} to {stop} of {self.length(source)} in source {source}")
        run = int(np.searchsorted(ends, start, side="right"))
        pieces = []
        while start < stop:
            end = int(ends[run])
            count = min(end, stop) - start
            pieces.append(self._streams.window(source, int(stops[run]) - end + start, count))
            start += count
            run += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def document_ends(self, source: int) -> np.ndarray:
        """See `Tokens.document_ends`."""
        (starts, stops), ends = self._runs[source], self._streams.document_ends(source)
        if not len(stops):
            return ends[:0]
        run = np.minimum(np.searchsorted(stops, ends), len(stops) - 1)
        found: np.ndarray = (ends - stops[run] + self._ends[source][run])[
            (starts[run] < ends) & (ends <= stops[run])
        ]
        return found

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.document_ends_by_part`; all at once."""
        yield self.document_ends(source)


def _runs(ends: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each run of chosen documents and the one after its last, int64 [runs]; documents end at
    `ends`."""
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    bounds = np.concatenate(([0], ends))
    return bounds[np.flatnonzero(edges == 1)], bounds[np.flatnonzero(edges == -1)]

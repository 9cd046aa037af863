"""Some documents of prepared data, read as if there were no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from orchestrator.data.samples.runs import Runs
from orchestrator.data.samples.windows import Streams, StreamsOf
from orchestrator.data.store.derived_arrays import CHUNK


class Subset(StreamsOf):
    """The streams of the chosen documents of each source, one after the other; implements `Streams`."""

    def __init__(self, streams: Streams, runs: Sequence[Runs], documents: int) -> None:
        """`runs` has for each source those of the chosen documents, of which there are `documents`."""
        super().__init__(streams)
        self.documents = documents
        self._runs = [(found.starts, found.stops) for found in runs]
        self._ends = [found.ends for found in runs]
        self.tokens = sum(map(self.length, range(self.sources)))

    @property
    def digest(self) -> str:
        """See `Tokens.digest`."""
        found = xxhash.xxh3_128(self._streams.digest.encode())
        for starts, stops in self._runs:
            found.update(np.array([len(starts)], "<i8").tobytes())
            for values in (starts, stops):
                for at in range(0, len(values), CHUNK):
                    found.update(values[at : at + CHUNK].astype("<i8").tobytes())
        return found.hexdigest()

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

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.document_ends_by_part`."""
        starts, stops = self._runs[source]
        for ends in self._streams.document_ends_by_part(source) if len(stops) else ():
            run = np.minimum(np.searchsorted(stops, ends), len(stops) - 1)
            inside = (starts[run] < ends) & (ends <= stops[run])
            run, ends = run[inside], ends[inside]
            yield np.asarray(ends - stops[run] + self._ends[source][run])

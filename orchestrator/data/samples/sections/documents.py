"""The documents of one section: those that end in the parts that no earlier section needs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import xxhash

from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.windows import Streams, StreamsOf
from orchestrator.data.store.tokens import Tokens


class SectionDocuments(StreamsOf):
    """The streams of a section's documents; implements `Streams`. The section must be available."""

    def __init__(self, tokens: Tokens, plan: SectionPlan, section: int) -> None:
        super().__init__(tokens)
        self._tokens = tokens
        before = plan.needed(section - 1) if section else [0] * len(plan.parts)
        bounds = zip(plan.first, before, plan.needed(section), strict=True)
        self._shards = [
            tokens.shards_of(source, first + begin, first + end)
            for source, (first, begin, end) in enumerate(bounds)
        ]
        self._bounds = [
            (tokens.documents_until(source, shards.start), tokens.documents_until(source, shards.stop))
            for source, shards in enumerate(self._shards)
        ]

    @property
    def digest(self) -> str:
        """See `Tokens.digest`. Also covers the shards in which these documents begin."""
        shards = []
        for number, (source, shards_of_source) in enumerate(
            zip(self.manifest.sources, self._shards, strict=True)
        ):
            first = self._tokens.last_begun(number, shards_of_source.start)
            shards.append(
                [[shard.tokens, shard.xxh3] for shard in source.shards[first : shards_of_source.stop]]
            )
        content = [self.manifest.dtype, shards, [stop - start for start, stop in self._bounds]]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    def length(self, source: int) -> int:
        """Return the number of tokens of the section's documents of a source."""
        start, stop = self._bounds[source]
        return stop - start

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """See `Tokens.window`."""
        if start < 0 or length < 0 or start + length > self.length(source):
            raise IndexError(
                f"tokens {start} to {start + length} of {self.length(source)} in source {source}"
            )
        return self._tokens.window(source, self._bounds[source][0] + start, length)

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.document_ends_by_part`."""
        for ends in self._tokens.document_ends_by_part(source, self._shards[source]):
            yield ends - self._bounds[source][0]

    def contents_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.contents_by_part`."""
        return self._tokens.contents_by_part(source, self._shards[source])


class JoinedStreams(StreamsOf):
    """The streams of the sections added so far, one after the other; implements `Streams`."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._added: list[Streams] = []
        self._ends = [[0] for _ in range(tokens.sources)]

    def add(self, section: Streams) -> list[int]:
        """Add the next section. Return where it begins in the stream of each source."""
        begins = [ends[-1] for ends in self._ends]
        self._added.append(section)
        for source, ends in enumerate(self._ends):
            ends.append(ends[-1] + section.length(source))
        return begins

    @property
    def digest(self) -> str:
        """See `Tokens.digest`."""
        return xxhash.xxh3_128_hexdigest("".join(section.digest for section in self._added).encode())

    def length(self, source: int) -> int:
        """Return the number of tokens of a source in the sections so far."""
        return self._ends[source][-1]

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """See `Tokens.window`. No sample crosses the end of a section."""
        section = int(np.searchsorted(self._ends[source], start, side="right")) - 1
        if start < 0 or section == len(self._added):
            raise IndexError(
                f"tokens {start} to {start + length} of {self.length(source)} in source {source}"
            )
        return self._added[section].window(source, start - self._ends[source][section], length)

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.document_ends_by_part`."""
        for section, begin in zip(self._added, self._ends[source][:-1], strict=True):
            for ends in section.document_ends_by_part(source):
                yield ends + begin

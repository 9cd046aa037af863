"""The samples of sections, and where each section ends in them. More sections may be added later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from orchestrator.config.errors import InputError
from orchestrator.data.samples.held_out_split import split
from orchestrator.data.samples.sections.documents import JoinedStreams, SectionDocuments
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.windows import Streams, Windows, packed_windows, windows_of
from orchestrator.data.store.tokens import Tokens

if TYPE_CHECKING:
    from workloads.workload import Windowing


class Sections(Protocol):
    """The samples of each source that are available so far. The sample with a given number never changes.

    A call with the number of a section waits for that section. It returns the number of samples of each source up to
    the section's end, and raises as `Tokens.await_section`.
    """

    @property
    def streams(self) -> Streams:
        """The streams that the samples are read from."""

    @property
    def windows(self) -> Sequence[Windows]:
        """The samples of each source."""

    def __call__(self, section: int, /) -> Sequence[int]: ...

    def sizes(self, for_whole_source: bool) -> tuple[list[int], list[int]]:
        """Return how many tokens and samples each source has in the parts that the first section needs.

        With `for_whole_source`, return estimates for the whole source: those numbers, scaled by the bytes of the
        source's files over the bytes of those parts.
        """


@dataclass(frozen=True)
class GrowingWindows:
    """A full window every `stride` tokens of a source, as far as tokens are available; implements `Windows`."""

    stream: Tokens
    source: int
    windowing: Windowing

    @property
    def documents(self) -> int | None:
        """See `Windows`."""
        return None

    @property
    def tokens(self) -> int:
        """See `Windows`."""
        return len(self) * self.windowing.window

    def __len__(self) -> int:
        return self.within(self.stream.length(self.source))

    def within(self, tokens: int) -> int:
        """Return how many samples fit in the first `tokens` tokens."""
        return max(0, (tokens - self.windowing.window) // self.windowing.stride + 1)

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        return ((sample * self.windowing.stride, self.windowing.window),)

    def siblings(self, sample: int) -> range:
        """Not available: documents are not considered. See `Windows`."""
        raise NotImplementedError

    def companions(self, sample: int) -> range:
        """Not available: the objectives that need it read documents. See `Windows`."""
        raise NotImplementedError


@dataclass(frozen=True)
class StreamSections:
    """Windows of one stream for each source, which may cross the ends of sections; implements `Sections`.

    A section that ends within a part gets the same share of the part's samples.
    """

    streams: Tokens
    plan: SectionPlan
    windows: Sequence[GrowingWindows]

    def __call__(self, section: int) -> list[int]:
        """See `Sections`."""
        self.streams.await_section(section)
        totals = []
        for windows, (complete, remainder) in zip(self.windows, self.plan.end(section), strict=True):
            first = self.plan.first[windows.source]
            count, after = (
                windows.within(self.streams.tokens_before(windows.source, first + parts))
                for parts in (complete, complete + 1)
            )
            totals.append(count + (after - count) * remainder // self.plan.sections)
        return totals

    def sizes(self, for_whole_source: bool) -> tuple[list[int], list[int]]:
        """See `Sections`. All samples have the same length, so both results count tokens."""
        if not for_whole_source:
            unit_lengths = [1] * self.streams.sources
            return unit_lengths, unit_lengths
        self.streams.await_section(0)
        ends = [first + needed for first, needed in zip(self.plan.first, self.plan.needed(0), strict=True)]
        available = [self.streams.tokens_before(source, end) for source, end in enumerate(ends)]
        estimates = self.plan.extrapolated(available)
        return estimates, estimates


class JoinedWindows:
    """The samples of a source, section after section; implements `Windows`."""

    def __init__(self) -> None:
        self._added: list[tuple[int, Windows]] = []
        self._ends = [0]

    def add(self, begin: int, windows: Windows) -> None:
        """Add the samples of the next section, whose tokens begin at `begin`."""
        self._added.append((begin, windows))
        self._ends.append(self._ends[-1] + len(windows))

    @property
    def documents(self) -> int | None:
        """See `Windows`."""
        return sum(windows.documents or 0 for _, windows in self._added)

    @property
    def tokens(self) -> int:
        """See `Windows`."""
        return sum(windows.tokens for _, windows in self._added)

    def __len__(self) -> int:
        return self._ends[-1]

    def before(self, section: int) -> int:
        """Return how many samples come before a section."""
        return self._ends[section]

    @property
    def first(self) -> Windows:
        """The samples of the first section."""
        return self._added[0][1]

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        section = self._section(sample)
        begin, windows = self._added[section]
        return [(begin + start, length) for start, length in windows.pieces(sample - self._ends[section])]

    def siblings(self, sample: int) -> range:
        """See `Windows`."""
        section = self._section(sample)
        before = self._ends[section]
        siblings = self._added[section][1].siblings(sample - before)
        return range(before + siblings.start, before + siblings.stop)

    def companions(self, sample: int) -> range:
        """See `Windows`. Only samples of the same section, because later ones may not exist yet."""
        section = self._section(sample)
        return range(self._ends[section], self._ends[section + 1])

    def _section(self, sample: int) -> int:
        return int(np.searchsorted(self._ends, sample, side="right")) - 1


class DocumentSections:
    """Samples that are each made of documents of one section; implements `Sections`. Not thread-safe.

    Args:
        tokens: the prepared data.
        plan: its sections.
        windowing: how samples are made.
        packed: pack the documents of a section by best fit.
        share: share of the documents that is held out from training; None for none.
    """

    def __init__(
        self, tokens: Tokens, plan: SectionPlan, windowing: Windowing, packed: bool, share: float | None
    ) -> None:
        self._tokens = tokens
        self._plan = plan
        self._windowing = windowing
        self._make = packed_windows if packed else windows_of
        self._share = share
        self._added = 0
        self.streams = JoinedStreams(tokens)
        self.windows = [JoinedWindows() for _ in range(tokens.sources)]

    def __call__(self, section: int) -> list[int]:
        """See `Sections`. A section that ends within another section's parts gets the same share of its samples."""
        self._reach(section)
        return [self._within(source, section, windows) for source, windows in enumerate(self.windows)]

    def sizes(self, for_whole_source: bool) -> tuple[list[int], list[int]]:
        """See `Sections`. Raises InputError for a source without a sample there."""
        self._reach(0)
        for source, windows in enumerate(self.windows):
            if not windows.before(1):
                problem = (
                    "has no sample in its first section, which determines the proportions of the mixture"
                )
                raise InputError(
                    problem, f"data.sources.{source}", "give more text, or leave out data.shuffle"
                )
        samples = [windows.before(1) for windows in self.windows]
        tokens = [windows.first.tokens for windows in self.windows]
        if not for_whole_source:
            return tokens, samples
        return self._plan.extrapolated(tokens), self._plan.extrapolated(samples)

    def _reach(self, section: int) -> None:
        """Wait for the sections up to this one, and add them."""
        while self._added <= section:
            self._tokens.await_section(self._added)
            every = SectionDocuments(self._tokens, self._plan, self._added)
            trained = (
                every if self._share is None else split(every, self._share, needs_both_sides=False).training
            )
            begins = self.streams.add(trained)
            for source, (begin, windows) in enumerate(zip(begins, self.windows, strict=True)):
                windows.add(begin, self._make(trained, source, self._windowing))
            self._added += 1
            if self._added == 1:
                self._refuse_few()

    def _refuse_few(self) -> None:
        """Raise InputError if the first section has fewer documents than the objective needs."""
        documents = sum(windows.documents or 0 for windows in self.windows)
        if self._windowing.unit != "stream" and documents < self._windowing.documents:
            needed = self._windowing.documents
            problem = (
                f"the first section has {documents} document(s), but the objective needs at least {needed}"
            )
            raise InputError(problem, "data.sources", "give more documents, or leave out data.shuffle")

    def _within(self, source: int, section: int, windows: JoinedWindows) -> int:
        """Return how many samples of a source come before the end of a section."""
        sections = self._plan.sections
        end = self._plan.parts[source] * (section + 1)
        number = section
        while number and self._plan.needed(number - 1)[source] * sections >= end:
            number -= 1
        begin = self._plan.needed(number - 1)[source] if number else 0
        parts = self._plan.needed(number)[source] - begin
        first = windows.before(number)
        after = windows.before(number + 1)
        return first + ((after - first) * (end - begin * sections) // (parts * sections) if parts else 0)


def sections_of(
    tokens: Tokens, plan: SectionPlan, windowing: Windowing, packed: bool = False, share: float | None = None
) -> Sections:
    """Return the samples of prepared data section by section, see `DocumentSections`."""
    if windowing.unit == "stream" and not packed and share is None:
        windows = [GrowingWindows(tokens, source, windowing) for source in range(tokens.sources)]
        return StreamSections(tokens, plan, windows)
    return DocumentSections(tokens, plan, windowing, packed, share)

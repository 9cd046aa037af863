"""The samples of a stream that may still grow, and where sections end in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.data.sections.plan import SectionPlan
from orchestrator.data.tokens import Tokens

if TYPE_CHECKING:
    from workloads.workload import Reading


@dataclass(frozen=True)
class GrowingWindows:
    """A full window every `stride` tokens of a source, as far as there are tokens; implements `Windows`. That of a
    number never changes."""

    stream: Tokens
    source: int
    reading: Reading

    @property
    def documents(self) -> int | None:
        """See `Windows`."""
        return None

    @property
    def tokens(self) -> int:
        """See `Windows`."""
        return len(self) * self.reading.window

    def __len__(self) -> int:
        return self.within(self.stream.length(self.source))

    def within(self, tokens: int) -> int:
        """How many samples the first `tokens` tokens have."""
        return max(0, (tokens - self.reading.window) // self.reading.stride + 1)

    def pieces(self, sample: int) -> Sequence[tuple[int, int]]:
        """See `Windows`."""
        return ((sample * self.reading.stride, self.reading.window),)

    def siblings(self, sample: int) -> range:
        """See `Windows`. Not available: documents are not considered."""
        raise NotImplementedError


@dataclass(frozen=True)
class SectionEnds:
    """The number of samples of each source up to the end of a section, which is waited for."""

    stream: Tokens
    plan: SectionPlan
    windows: Sequence[GrowingWindows]

    def __call__(self, section: int) -> list[int]:
        """Raises as `Tokens.await_section`."""
        self.stream.await_section(section)
        found = []
        for windows, (whole, rest) in zip(self.windows, self.plan.end(section), strict=True):
            first = self.plan.first[windows.source]
            count, after = (
                windows.within(self.stream.tokens_before(windows.source, first + parts))
                for parts in (whole, whole + 1)
            )
            found.append(count + (after - count) * rest // self.plan.sections)
        return found

"""The parts of the text that each section has. Known as soon as the text is divided, before anything is tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.data.store.data_folder import DataFolder

if TYPE_CHECKING:
    from orchestrator.data.sources import Part

NAME = "plan.json"
FEWEST = 8
"""Minimum number of sections if there are enough parts. Training begins when an eighth of the text is prepared."""
PARTS = 64
"""Maximum number of parts in a section (2 GiB of text), because a section's samples are shuffled together."""


@dataclass(frozen=True)
class SectionPlan:
    """The division of prepared data into sections.

    Attributes:
        parts: number of parts of each source.
        bytes: for each source, bytes of the files in the parts that the first section needs, and in all parts.

    Section g of G ends after the share (g + 1) / G of each source, counted in parts. If that is within a part, the
    section gets the same share of the part's samples.
    """

    parts: tuple[int, ...]
    bytes: tuple[tuple[int, int], ...] = ()
    """Empty for data of an earlier version."""

    @classmethod
    def of(cls, parts: Sequence[Part], sources: int) -> SectionPlan:
        """Return the plan of text that is divided into `parts`, in the order of its sources."""
        named = [part[0].file.source for part in parts]
        assert named == sorted(named), "parts are in the order of their sources"
        plan = cls(tuple(named.count(source) for source in range(sources)))
        sizes = [sum(span.bytes for span in part) for part in parts]
        bounds = zip(plan.first, plan.needed(0), plan.parts, strict=True)
        section_bytes = ((sum(sizes[a : a + some]), sum(sizes[a : a + every])) for a, some, every in bounds)
        return replace(plan, bytes=tuple(section_bytes))

    @classmethod
    def read(cls, folder: DataFolder) -> SectionPlan | None:
        """Return the plan of prepared data; None for data of an earlier version."""
        stored = folder.read_json(NAME)
        if stored is None:
            return None
        return cls(tuple(stored["parts"]), tuple((some, every) for some, every in stored.get("bytes", ())))

    def write(self, folder: DataFolder) -> None:
        """Write the plan next to the prepared data, unless it is there already."""
        if self.read(folder) != self:
            folder.write_json(NAME, {"parts": self.parts, "bytes": self.bytes})

    def extrapolated(self, counts: Sequence[int]) -> list[int]:
        """Scale counts of the parts that the first section needs to estimates for the whole sources, by bytes.

        Raises InputError for data of an earlier version.
        """
        if not self.bytes:
            hint = "prepare the data again"
            raise InputError("lacks the sizes of its sources", NAME, hint)
        return [
            count * every // max(some, 1) for count, (some, every) in zip(counts, self.bytes, strict=True)
        ]

    @cached_property
    def sections(self) -> int:
        """Number of sections, at least 1."""
        every = sum(self.parts)
        return max(1, min(every, max(FEWEST, -(-every // PARTS))))

    @cached_property
    def first(self) -> list[int]:
        """The number of each source's first part."""
        return [end - count for count, end in zip(self.parts, accumulate(self.parts), strict=True)]

    def end(self, section: int) -> list[tuple[int, int]]:
        """Return where a section ends in each source: a number of whole parts, and a number of `sections`-ths of the
        next part.
        """
        return [divmod(count * (section + 1), self.sections) for count in self.parts]

    def needed(self, section: int) -> list[int]:
        """Return how many parts of each source the sections up to this one need."""
        return [complete + (remainder > 0) for complete, remainder in self.end(section)]

    def numbers(self, section: int) -> list[int]:
        """Return the numbers of the parts that this section needs and no earlier one does."""
        before = self.needed(section - 1) if section else [0] * len(self.parts)
        return [
            first + part
            for first, begin, end in zip(self.first, before, self.needed(section), strict=True)
            for part in range(begin, end)
        ]

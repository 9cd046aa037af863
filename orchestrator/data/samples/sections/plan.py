"""Which parts of the text each section has: known as soon as the text is divided, before any of it is tokenised."""

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
"""Sections where there are so many parts: training then begins when an eighth of the text is prepared."""
PARTS = 64
"""Parts of a section at most, which have 2 GiB of text: its samples are shuffled together."""


@dataclass(frozen=True)
class SectionPlan:
    """How many parts each source has, in the order of their numbers, and how many bytes of its files those hold that
    the first section needs, and all of them; and from the parts, the sections.

    Section g of G ends after the share (g + 1) / G of each source, counted in parts. Where that is within a part, the
    section has the same share of the part's samples.
    """

    parts: tuple[int, ...]
    bytes: tuple[tuple[int, int], ...] = ()
    """Empty for data of an earlier version."""

    @classmethod
    def of(cls, parts: Sequence[Part], sources: int) -> SectionPlan:
        """The plan of text that is divided into `parts`, in the order of its sources."""
        named = [part[0].file.source for part in parts]
        assert named == sorted(named), "parts are in the order of their sources"
        found = cls(tuple(named.count(source) for source in range(sources)))
        sizes = [sum(span.bytes for span in part) for part in parts]
        bounds = zip(found.first, found.needed(0), found.parts, strict=True)
        held = ((sum(sizes[a : a + some]), sum(sizes[a : a + every])) for a, some, every in bounds)
        return replace(found, bytes=tuple(held))

    @classmethod
    def read(cls, folder: DataFolder) -> SectionPlan | None:
        """The plan of prepared data, None for data of an earlier version."""
        found = folder.read_json(NAME)
        if found is None:
            return None
        return cls(tuple(found["parts"]), tuple((some, every) for some, every in found.get("bytes", ())))

    def write(self, folder: DataFolder) -> None:
        """Write the plan beside the prepared data, unless it is there."""
        if self.read(folder) != self:
            folder.write_json(NAME, {"parts": self.parts, "bytes": self.bytes})

    def extrapolated(self, counts: Sequence[int]) -> list[int]:
        """What there is of each source in all of it, of which the parts that the first section needs have `counts`: as
        much more as there are bytes.

        Raises InputError for data of an earlier version.
        """
        if not self.bytes:
            hint = "prepare the data again, which writes them"
            raise InputError("has no sizes of its sources", NAME, hint)
        return [
            count * every // max(some, 1) for count, (some, every) in zip(counts, self.bytes, strict=True)
        ]

    @cached_property
    def sections(self) -> int:
        """Number of sections, 1 at least."""
        every = sum(self.parts)
        return max(1, min(every, max(FEWEST, -(-every // PARTS))))

    @cached_property
    def first(self) -> list[int]:
        """The number of each source's first part."""
        return [end - count for count, end in zip(self.parts, accumulate(self.parts), strict=True)]

    def end(self, section: int) -> list[tuple[int, int]]:
        """Where a section ends in each source: so many parts, and so many `sections`-ths of the next one."""
        return [divmod(count * (section + 1), self.sections) for count in self.parts]

    def needed(self, section: int) -> list[int]:
        """How many parts of each source must be there for the sections up to this one."""
        return [whole + (rest > 0) for whole, rest in self.end(section)]

    def numbers(self, section: int) -> list[int]:
        """The numbers of the parts that this section needs and none before it."""
        before = self.needed(section - 1) if section else [0] * len(self.parts)
        return [
            first + part
            for first, begin, end in zip(self.first, before, self.needed(section), strict=True)
            for part in range(begin, end)
        ]

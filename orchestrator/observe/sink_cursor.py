"""Which rows of a run a receiver has: each step once, and again if it was retrained on other samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.storage.row_line import Row

KEPT = 64
"""Number of last steps whose samples are remembered: more than the retries of an instability go back."""
DIGITS = 16
"""The length of a receipt."""


@dataclass(frozen=True)
class Received:
    """The `last` step that a receiver has, and the samples used after each of the last steps."""

    last: int = -1
    samples: Mapping[int, str] = field(default_factory=dict)

    @property
    def since(self) -> int:
        """Return the step after which rows may be missing."""
        return min([self.last, *(step - 1 for step in self.samples)])

    def lacks(self, row: Row) -> bool:
        """Return whether the row has a later step, or one that was retrained on other samples."""
        step = row.get("step")
        if not isinstance(step, int):
            return False
        before = self.samples.get(step)
        used = row.get("samples")
        return step > self.last or bool(before and used and before != used[:DIGITS])

    def and_row(self, row: Row) -> Received:
        """Return the state after the receiver gets that row, which invalidates all later steps."""
        step = row["step"]
        used = row.get("samples")
        kept = {each: of for each, of in self.samples.items() if step - KEPT < each < step}
        return Received(step, kept | {step: used[:DIGITS]} if used else kept)

    def at(self, last: int) -> Received:
        """Return the state of a receiver whose last step is `last`."""
        return Received(last, {step: used for step, used in self.samples.items() if step <= last})

    def lacking(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Received]]:
        """Yield the missing rows in order, each with the state after it."""
        received = self
        for row in rows:
            if received.lacks(row):
                received = received.and_row(row)
                yield row, received

    def to_text(self) -> str:
        """Return `samples` as text for a tag."""
        return json.dumps(list(self.samples.items()))

    @classmethod
    def from_text(cls, last: int, text: str) -> Received:
        """Restore the state from `to_text`. An invalid text restores nothing."""
        try:
            return cls(last, {int(step): str(used) for step, used in json.loads(text)})
        except (ValueError, TypeError):
            return cls(last)

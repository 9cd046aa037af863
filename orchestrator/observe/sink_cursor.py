"""What a receiver of rows has of a run: each step once, and again where it was trained anew on other samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.storage.row_line import Row

KEPT = 64
"""The last steps whose samples are remembered: more than the retries of an instability reach back."""
DIGITS = 16
"""Of a receipt."""


@dataclass(frozen=True)
class Received:
    """The `last` step that a receiver has, and which samples had been used after each of the last ones."""

    last: int = -1
    samples: Mapping[int, str] = field(default_factory=dict)

    @property
    def since(self) -> int:
        """The rows after that step may be lacking."""
        return min([self.last, *(step - 1 for step in self.samples)])

    def lacks(self, row: Row) -> bool:
        """Whether the row is of a later step, or of one that was trained again on other samples."""
        step = row.get("step")
        if not isinstance(step, int):
            return False
        known = self.samples.get(step)
        used = row.get("samples")
        return step > self.last or bool(known and used and known != used[:DIGITS])

    def and_row(self, row: Row) -> Received:
        """What it has once it was given that row too: what is beyond that step never was."""
        step = row["step"]
        used = row.get("samples")
        kept = {each: of for each, of in self.samples.items() if step - KEPT < each < step}
        return Received(step, kept | {step: used[:DIGITS]} if used else kept)

    def at(self, last: int) -> Received:
        """What is known of a receiver that says that `last` is its last step."""
        return Received(last, {step: used for step, used in self.samples.items() if step <= last})

    def lacking(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Received]]:
        """The rows that it lacks, in order, each with what it has then."""
        received = self
        for row in rows:
            if received.lacks(row):
                received = received.and_row(row)
                yield row, received

    def to_text(self) -> str:
        """Of `samples`, for a tag."""
        return json.dumps(list(self.samples.items()))

    @classmethod
    def from_text(cls, last: int, text: str) -> Received:
        """The inverse of `to_text`; nothing is known of a text that is none."""
        try:
            return cls(last, {int(step): str(used) for step, used in json.loads(text)})
        except (ValueError, TypeError):
            return cls(last)

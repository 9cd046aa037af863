"""Which special tokens stand around and within the tokens of texts in prepared data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from orchestrator.data.encoding.engines import Encoded
from orchestrator.data.encoding.tokenizer import around_text
from orchestrator.data.sources.documents import TextPiece


@dataclass(frozen=True)
class Framing:
    """What is written around each text, and how a text that names special tokens is read.

    Attributes:
        before: the tokens before a text, such as bos. They are not written twice where a text begins with them.
        after: those behind it, in front of the one that ends a document.
        parsed: whether the name of a special token in a text is read as that token, and not as characters.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    parsed: bool = False

    @classmethod
    def of(cls, tokenizer: str, eos: int, framed: bool, parsed: bool) -> Framing:
        """That of a tokenizer, given as JSON: what it puts around a text, if texts are `framed`."""
        if not framed:
            return cls(parsed=parsed)
        before, after = around_text(Tokenizer.from_str(tokenizer))
        return cls(before, after[:-1] if after[-1:] == (eos,) else after, parsed)

    def to_json(self) -> dict[str, Any]:
        """As plain data, which is part of the fingerprint; empty if nothing is written and nothing parsed."""
        return asdict(self) if self != UNFRAMED else {}

    def around(self, ids: Sequence[int] | np.ndarray, eos: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and behind the tokens of a text."""
        return self.opening(ids), self.closing(ids, eos)

    def opening(self, ids: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        """What stands before a text that begins with these tokens."""
        is_there = self.parsed and tuple(ids[: len(self.before)]) == self.before
        return () if is_there else self.before

    def closing(self, ids: Sequence[int] | np.ndarray, eos: int) -> tuple[int, ...]:
        """What stands behind a text that ends with these tokens."""
        is_there = self.parsed and len(ids) > 0 and ids[-1] == eos
        return () if is_there else (*self.after, eos)


UNFRAMED = Framing()
"""Nothing is written around a text, and names of special tokens in it are characters."""


def framed(
    encoded: Encoded, pieces: Sequence[TextPiece], framing: Framing, eos: int, sep: int | None, goes_on: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of pieces with what stands around each document, or behind the first text of a pair, and the ends of the
    documents among them, int64. `goes_on` is whether the first piece goes on with a document."""
    places: list[int] = []
    values: list[int] = []
    ends: list[int] = []
    start = 0
    begins = not goes_on
    for piece, stop in zip(pieces, encoded.ends.tolist(), strict=True):
        ids = encoded.ids[start:stop]
        opening = framing.opening(ids) if begins else ()
        closing: tuple[int, ...] = framing.closing(ids, eos) if piece.ends else ()
        if piece.halves:
            assert sep is not None
            closing = (sep,)
        places += [start] * len(opening) + [stop] * len(closing)
        values += [*opening, *closing]
        if piece.ends:
            ends.append(stop + len(values))
        start = stop
        begins = piece.ends
    inserted = np.array(values, dtype=encoded.ids.dtype)
    return np.insert(encoded.ids, places, inserted), np.array(ends, dtype=np.int64)

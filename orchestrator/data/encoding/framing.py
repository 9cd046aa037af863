"""The special tokens around and within the tokens of each text in prepared data."""

from __future__ import annotations

import json
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
    """The tokens written around each text, and how names of special tokens in a text are read.

    Attributes:
        before: tokens before a text, such as bos. They are not repeated if parsing already put them there.
        after: tokens after a text, before the one that ends the document.
        parsed: whether the name of a special token in a text is read as that token, instead of as characters.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    parsed: bool = False

    @classmethod
    def of(cls, tokenizer: str, eos: int, framed: bool, parsed: bool) -> Framing:
        """Return the framing of a tokenizer, given as JSON: the tokens that it puts around a text, if texts are
        `framed`.
        """
        if not framed:
            return cls(parsed=parsed)
        before, after = around_text(Tokenizer.from_str(tokenizer))
        return cls(before, after[:-1] if after[-1:] == (eos,) else after, parsed)

    def to_json(self) -> dict[str, Any]:
        """Return the framing as part of the fingerprint; empty without any."""
        return asdict(self) if self != UNFRAMED else {}

    def around(self, ids: Sequence[int] | np.ndarray, eos: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens before and after a text."""
        return self.opening(ids), self.closing(ids, eos)

    def opening(self, ids: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        """Return the tokens before a text that begins with `ids`."""
        is_there = self.parsed and tuple(ids[: len(self.before)]) == self.before
        return () if is_there else self.before

    def closing(self, ids: Sequence[int] | np.ndarray, eos: int) -> tuple[int, ...]:
        """Return the tokens after a text that ends with `ids`."""
        is_there = self.parsed and len(ids) > 0 and ids[-1] == eos
        return () if is_there else (*self.after, eos)


UNFRAMED = Framing()
"""No tokens around a text; names of special tokens in it are characters."""


def framed(
    encoded: Encoded, pieces: Sequence[TextPiece], framing: Framing, eos: int, sep: int | None, goes_on: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Insert the framing of each document, and the separator after the first text of a pair.

    Args:
        encoded, pieces: the ids of the pieces, and the pieces.
        framing, eos, sep: the tokens to insert.
        goes_on: whether the first piece continues a document.

    Returns:
        The ids, and the index after each document that ends among them, int64 [documents].
    """
    insert_at: list[int] = []
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
        insert_at += [start] * len(opening) + [stop] * len(closing)
        values += [*opening, *closing]
        if piece.ends:
            # `values` holds all insertions so far, by which this end moves.
            ends.append(stop + len(values))
        start = stop
        begins = piece.ends
    inserted = np.array(values, dtype=encoded.ids.dtype)
    return np.insert(encoded.ids, insert_at, inserted), np.array(ends, dtype=np.int64)


def unframed(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of the tokenizer that puts no tokens around texts."""
    written = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**written, "post_processor": None}))

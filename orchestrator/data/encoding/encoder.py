"""Encoding the text of a part, by a faster engine that is compared with the reference on a share of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from orchestrator.data.encoding.engines import Compared, Encoded, Engine, fast, reference
from orchestrator.data.sources.documents import TextPiece

EVERY = 256
"""Of so many pieces of text one is encoded by the reference too, the first of each part always."""
COMPARED = 2**12
"""Characters of a piece that are compared: of a longer one, both engines encode its beginning once more. The reference
takes as long for some long documents as the engine for a whole part."""


class EngineDiffers(Exception):
    """The engine `name` has given other ids than the reference."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} gives other ids than the reference")
        self.name = name


class PartEncoder:
    """Encodes the pieces of a part by the engine that is chosen for the tokenizer's JSON `text`: the reference,
    or, if it is `allowed`, a faster one."""

    def __init__(self, text: str, number: int, allowed: bool = True, parse: bool = False) -> None:
        """`number` draws what is compared; with `parse` the names of special tokens in a text are the tokens."""
        self._reference = reference(text, parse)
        self._engine: Engine = (fast(text, parse) if allowed else None) or self._reference
        self._draw = np.random.default_rng(number)
        self._first = True
        self._compared = [0, 0]

    @property
    def compared(self) -> Compared:
        """The engine, and how much of the text was compared."""
        return Compared(self._engine.name, *self._compared)

    def encode(self, pieces: Sequence[TextPiece]) -> Encoded:
        """The ids of the pieces. Raises EngineDiffers."""
        found = self._engine.encode([piece.text for piece in pieces])
        if self._engine is not self._reference:
            for number in self._drawn(pieces):
                self._compare(found, number, pieces[number].text)
        return found

    def _drawn(self, pieces: Sequence[TextPiece]) -> Iterator[int]:
        for number, lot in enumerate(self._draw.random(len(pieces))):
            if lot < 1 / EVERY or self._first:
                yield number
            self._first = False

    def _compare(self, found: Encoded, number: int, text: str) -> None:
        if len(text) > COMPARED:
            text = text[:COMPARED]
            found, number = self._engine.encode([text]), 0
        if not np.array_equal(found.of(number), self._reference.encode([text]).ids):
            raise EngineDiffers(self._engine.name)
        self._compared[0] += 1
        self._compared[1] += len(text.encode())

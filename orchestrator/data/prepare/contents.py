"""What tells documents apart: the length and a hash of each one's text, however it was cut into pieces and parts.

The hash is the text, read as one number in base 256, modulo the prime 2^127 - 1 (Karp and Rabin, 1987): that of two
pieces joined follows from theirs. A document's digest mixes both into 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from orchestrator.data.samples.order import mix
from orchestrator.data.sources.documents import TextPiece

PRIME_BITS = 127
PRIME = 2**PRIME_BITS - 1
BETWEEN = 0xFF
"""What is hashed between the two texts of a pair; no byte of UTF-8."""
ENTRY = np.dtype([("bytes", "<u8"), ("low", "<u8"), ("high", "<u8")])
"""An entry of an index: bytes of text, and the two halves of the hash."""


class Content(NamedTuple):
    """The bytes of text of a piece of a document, and its hash."""

    bytes: int = 0
    hash: int = 0

    def joined(self, after: Content) -> Content:
        """The content of this piece and the one after it."""
        # 256^n modulo 2^127 - 1 is a power of two
        shifted = self.hash << (8 * after.bytes % PRIME_BITS)
        return Content(self.bytes + after.bytes, (shifted + after.hash) % PRIME)


class ContentIndex:
    """The contents of the documents of one shard, and last that of the document which the next shard continues, empty
    if there is none."""

    def __init__(self) -> None:
        self._entries: list[bytes] = []
        self._held = Content()

    def add(self, piece: TextPiece) -> None:
        """The next piece of the shard's text."""
        data = piece.text.encode()
        self._held = self._held.joined(Content(len(data), _remainder(int.from_bytes(data))))
        if piece.halves:  # a pair is never cut, so that what is no text need not be counted
            self._held = Content(self._held.bytes, (self._held.hash << 8 | BETWEEN) % PRIME)
        if piece.ends:
            self._entries.append(_packed(self._held))
            self._held = Content()

    def to_bytes(self) -> bytes:
        """The index as it is stored: an `ENTRY` for each document, and the last."""
        return b"".join([*self._entries, _packed(self._held)])


def _remainder(number: int) -> int:
    """`number` modulo PRIME. Of a long one the halves are added, since a power of two with a multiple of PRIME_BITS
    leaves 1: that takes a time in proportion to its length, a division much more."""
    while (bits := number.bit_length()) > 4 * PRIME_BITS:
        half = bits // 2 // PRIME_BITS * PRIME_BITS
        number = (number >> half) + (number & ((1 << half) - 1))
    return number % PRIME


def documents_of(indices: Iterable[bytes]) -> np.ndarray:
    """The contents of the documents of a source, ENTRY [documents], from the indices of its shards in order."""
    return np.concatenate([np.zeros(0, ENTRY), *documents_by_part(indices)])


def documents_by_part(indices: Iterable[bytes]) -> Iterator[np.ndarray]:
    """`documents_of` shard by shard: the documents that end in each."""
    held = Content()
    for index in indices:
        entries = np.frombuffer(index, ENTRY).copy()
        first = held.joined(_content(entries[0]))
        if len(entries) == 1:
            held = first
        else:
            entries[0] = np.frombuffer(_packed(first), ENTRY)[0]
            held = _content(entries[-1])
        yield entries[:-1]


def digests(contents: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each document's text, uint64 of the shape of `contents`: uniform, and equal for equal texts
    alone, as far as 64 bits tell."""
    found: np.ndarray = mix(mix(mix(contents["bytes"]) ^ contents["low"]) ^ contents["high"])
    return found


def _content(entry: np.void) -> Content:
    return Content(int(entry["bytes"]), int(entry["high"]) << 64 | int(entry["low"]))


def _packed(content: Content) -> bytes:
    return content.bytes.to_bytes(8, "little") + content.hash.to_bytes(16, "little")

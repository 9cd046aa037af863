"""The identity of documents: the length and a hash of each document's text, however it was cut into pieces and parts.

The hash is the text, read as one number in base 256, modulo the prime 2^127 - 1 (Karp and Rabin, 1987). The hash of
two joined pieces follows from their hashes. A document's digest mixes length and hash into 64 bits.
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
"""The byte that is hashed between the two texts of a pair; it never occurs in UTF-8."""
ENTRY = np.dtype([("bytes", "<u8"), ("low", "<u8"), ("high", "<u8")])
"""An index entry: bytes of text, and the two halves of the hash."""


class Content(NamedTuple):
    """The number of text bytes in a piece of a document, and their hash."""

    bytes: int = 0
    hash: int = 0

    def joined(self, after: Content) -> Content:
        """Return the content of this piece followed by `after`."""
        # Multiplying by 256^n modulo 2^127 - 1 shifts by a power of two.
        shifted = self.hash << (8 * after.bytes % PRIME_BITS)
        return Content(self.bytes + after.bytes, (shifted + after.hash) % PRIME)


class ContentIndex:
    """The contents of one shard's documents. The last entry is the beginning of the document that the next shard
    continues; it is empty if no document does.
    """

    def __init__(self) -> None:
        self._entries: list[bytes] = []
        self._unfinished = Content()

    def add(self, piece: TextPiece) -> None:
        """Add the next piece of the shard's text."""
        data = piece.text.encode()
        self._unfinished = self._unfinished.joined(Content(len(data), _remainder(int.from_bytes(data))))
        if piece.halves:  # pairs are never cut, so the separator byte need not be counted
            self._unfinished = Content(self._unfinished.bytes, (self._unfinished.hash << 8 | BETWEEN) % PRIME)
        if piece.ends:
            self._entries.append(_packed(self._unfinished))
            self._unfinished = Content()

    def to_bytes(self) -> bytes:
        """Return the stored form: one `ENTRY` for each document, and the last one."""
        return b"".join([*self._entries, _packed(self._unfinished)])


def _remainder(number: int) -> int:
    """Return `number` modulo PRIME.

    A long number is folded in half repeatedly: 2^k leaves remainder 1 if k is a multiple of PRIME_BITS, so the halves
    can be added. This takes time proportional to the length; a division takes much longer.
    """
    while (bits := number.bit_length()) > 4 * PRIME_BITS:
        half = bits // 2 // PRIME_BITS * PRIME_BITS
        number = (number >> half) + (number & ((1 << half) - 1))
    return number % PRIME


def documents_by_part(indices: Iterable[bytes]) -> Iterator[np.ndarray]:
    """Yield the contents of the documents that end in each shard, ENTRY [documents].

    Args:
        indices: the content index of each of a source's shards, in order.
    """
    unfinished = Content()
    for index in indices:
        entries = np.frombuffer(index, ENTRY).copy()
        first = unfinished.joined(_content(entries[0]))
        if len(entries) == 1:
            unfinished = first
        else:
            entries[0] = np.frombuffer(_packed(first), ENTRY)[0]
            unfinished = _content(entries[-1])
        yield entries[:-1]


def digests(contents: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each document's text, uint64 with the shape of `contents`.

    Hashes are uniform. Equal texts have equal hashes; different texts differ up to 64-bit collisions.
    """
    mixed: np.ndarray = mix(mix(mix(contents["bytes"]) ^ contents["low"]) ^ contents["high"])
    return mixed


def _content(entry: np.void) -> Content:
    return Content(int(entry["bytes"]), int(entry["high"]) << 64 | int(entry["low"]))


def _packed(content: Content) -> bytes:
    return content.bytes.to_bytes(8, "little") + content.hash.to_bytes(16, "little")

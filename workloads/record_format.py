"""The stored form of a record: its sections, such as a text and a label, as one array of 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workloads.errors import WorkloadError

MARK = 1 << 31
"""The bit that marks a predicted token in a word of a conversation. The other bits are the token's id."""

CLOSE = 1 << 30
"""The word after each record. It is not a token and not part of the record."""


def pack(sections: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Return the words of a record, uint32: the number of sections, the length of each, and the sections."""
    sizes = [len(sections), *(len(section) for section in sections)]
    return np.concatenate([np.asarray(part, dtype=np.uint32) for part in (sizes, *sections)])


def unpack(words: np.ndarray) -> list[np.ndarray]:
    """Return the sections of a record, int64; the inverse of `pack`. Raises WorkloadError for anything else."""
    words = np.asarray(words, dtype=np.int64)
    count = int(words[0]) if len(words) else 0
    sizes = words[1 : 1 + count]
    if not 0 < count < len(words) or 1 + count + sizes.sum() != len(words):
        raise WorkloadError("the prepared data does not hold records; prepare it for this objective")
    return np.split(words[1 + count :], np.cumsum(sizes)[:-1])


def from_end(words: np.ndarray, length: int, before: Sequence[int]) -> np.ndarray:
    """Return the last `length` marked tokens of a longer text, still beginning with the tokens `before`, because a
    model may need them.
    """
    if len(words) <= length:
        return words
    first = words[: len(before)].astype(np.int64) & ~MARK
    kept = len(before) if np.array_equal(first, before) and len(before) < length else 0
    return np.concatenate([words[:kept], words[len(words) - length + kept :]])


def to_bits(value: float) -> int:
    """Return a number as a word: the bits of its fp32 value."""
    return int(np.float32(value).view(np.uint32))


def from_bits(word: int) -> np.float32:
    """Return the number in a word; the inverse of `to_bits`."""
    number: np.float32 = np.uint32(word).view(np.float32)
    return number

"""How a record stands in prepared data: its sections, such as a text and a label, as one array of 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workloads.errors import WorkloadError

MARK = 1 << 31
"""The bit of a word of a conversation that is set where the token is predicted; the others are its id."""

CLOSE = 1 << 30
"""The word after each record, which is no token and no part of it."""


def pack(sections: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """The words of a record, uint32: how many sections, the length of each, and the sections."""
    sizes = [len(sections), *(len(section) for section in sections)]
    return np.concatenate([np.asarray(part, dtype=np.uint32) for part in (sizes, *sections)])


def unpack(words: np.ndarray) -> list[np.ndarray]:
    """The inverse of `pack`; sections are int64. Raises WorkloadError for what is no record."""
    words = np.asarray(words, dtype=np.int64)
    count = int(words[0]) if len(words) else 0
    sizes = words[1 : 1 + count]
    if not 0 < count < len(words) or 1 + count + sizes.sum() != len(words):
        raise WorkloadError("the prepared data holds no records; prepare it for this objective")
    return np.split(words[1 + count :], np.cumsum(sizes)[:-1])


def from_end(words: np.ndarray, length: int, before: Sequence[int]) -> np.ndarray:
    """The last `length` marked tokens of a longer text. What stands before it, as `before`, stays there: a model may
    take nothing well that does not begin with it."""
    if len(words) <= length:
        return words
    first = words[: len(before)].astype(np.int64) & ~MARK
    kept = len(before) if np.array_equal(first, before) and len(before) < length else 0
    return np.concatenate([words[:kept], words[len(words) - length + kept :]])


def to_bits(value: float) -> int:
    """A number as a word: the bits of its fp32 value."""
    return int(np.float32(value).view(np.uint32))


def from_bits(word: int) -> np.float32:
    """The inverse of `to_bits`."""
    found: np.float32 = np.uint32(word).view(np.float32)
    return found

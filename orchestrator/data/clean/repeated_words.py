"""The rules of Gopher about repeated words (Rae et al., 2021, appendix A1.1).

datatrove's filter joins the words of an n-gram before it compares them, so that "ab c" equals "a bc", and removes
tables of numbers in which nothing repeats. Here two n-grams are equal only if each of their words is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from orchestrator.data.clean.config import GopherRepetition
from orchestrator.data.clean.words import counted


def repeated_words(text: str, rule: GopherRepetition) -> str:
    """Return which rule about repeated words removes a text; empty if none does."""
    counts = counted(text)
    total = len(counts.numbers)
    # ends[i] is the number of characters before word i, without spaces.
    ends = np.concatenate([[0], np.cumsum(counts.lengths)])
    rows = _HashRows(counts.numbers)
    for length, share in sorted(rule.top):
        if total < length or not share:
            continue
        at, times = rows.most_frequent(length)
        characters = ends[at + length] - ends[at] + length - 1  # with the spaces between words
        if characters * times / len(text) > share:
            return f"the most frequent {length} words"
    smallest = min((share for _, share in rule.repeated if share), default=1.0)
    for length, share in sorted(rule.repeated):
        if total < length or rows.characters(length, ends) / len(text) <= smallest:
            break  # longer n-grams repeat within repeated shorter ones, so they cover no more
        if share and _repeated_characters(rows.of(length), ends, length) / len(text) > share:
            return f"repeated {length} words"
    return ""


class _Repeated(NamedTuple):
    """The n-grams that occur more than once.

    Attributes:
        positions: index of each one's first word, ascending, int64.
        rows: a number for each, equal for equal n-grams, int64.
    """

    positions: np.ndarray
    rows: np.ndarray


class _HashRows:
    """The repeated n-grams of a text, computed from the number of each word.

    A repeated n-gram begins with a repeated (n-1)-gram. Each length is therefore derived from the one before.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._words = int(numbers.max(initial=0)) + 1
        self._repeated = [_Repeated(np.arange(len(numbers)), numbers)]  # all single words are candidates

    def of(self, length: int) -> _Repeated:
        """Return the repeated n-grams of `length` words, at least 2."""
        while len(self._repeated) < length:
            (starts, rows), size = self._repeated[-1], len(self._repeated)
            end = np.searchsorted(starts, len(self._numbers) - size)
            # The pair (number of the prefix, next word) identifies an n-gram without hashing.
            keys = rows[:end] * self._words + self._numbers[starts[:end] + size]
            self._repeated.append(_repeated(starts[:end], keys))
        return self._repeated[length - 1]

    def characters(self, length: int, ends: np.ndarray) -> int:
        """Return the characters covered by repeated n-grams of `length` words; overlaps count once."""
        starts = self.of(length).positions
        begins = starts.copy()
        begins[1:] = np.maximum(starts[1:], starts[:-1] + length)
        return int((ends[starts + length] - ends[begins]).sum())

    def most_frequent(self, length: int) -> tuple[int, int]:
        """Return the first start of the most frequent n-gram of `length` words, and its count."""
        starts, rows = self.of(length)
        if not len(rows):
            return 0, 1
        counts = np.bincount(rows)
        highest = int(counts.max())
        return int(starts[(counts[rows] == highest).argmax()]), highest


def _repeated(starts: np.ndarray, rows: np.ndarray) -> _Repeated:
    """Keep the n-grams that occur more than once, and renumber them from 0."""
    ordered = np.sort(rows)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return _Repeated(twice, twice)
    result = np.minimum(np.searchsorted(twice, rows), len(twice) - 1)
    is_repeated = twice[result] == rows
    return _Repeated(starts[is_repeated], result[is_repeated])


def _repeated_characters(repeated: _Repeated, ends: np.ndarray, length: int) -> int:
    """Return the characters of n-grams that repeat an earlier one; overlapping repetitions count once."""
    earlier_ngrams: set[int] = set()
    characters = at = 0
    for start, row in zip(repeated.positions.tolist(), repeated.rows.tolist(), strict=True):
        if start < at:
            continue
        if row in earlier_ngrams:
            characters += int(ends[start + length] - ends[start])
            at = start + length
        else:
            earlier_ngrams.add(row)
    return characters

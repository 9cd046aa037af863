"""The rules of Gopher (Rae et al., 2021, appendix A1.1), as datatrove 0.10 implements them.

Two deliberate differences: words are those of `words`, and two n-grams are equal only if each of their words is.
datatrove compares joined words, so that "ab c" equals "a bc".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.data.clean.config import GopherQuality, GopherRepetition
from orchestrator.data.clean.words import counted, words

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
ELLIPSES = ("...", "\u2026")
BULLETS = ("\u2022", "-")


def quality(text: str, rule: GopherQuality) -> str:
    """Return why the quality rules remove a text; empty if they keep it."""
    found = counted(text)
    total = len(found.numbers)
    lengths = found.lengths[~found.symbols]
    number = len(lengths)
    if rule.min_words and number < rule.min_words:
        return "too few words"
    if rule.max_words and number > rule.max_words:
        return "too many words"
    if not number:
        return "no words"
    mean = int(lengths.sum()) / number
    if rule.min_word_length and mean < rule.min_word_length:
        return "words too short"
    if rule.max_word_length and mean > rule.max_word_length:
        return "words too long"
    if rule.max_symbols and text.count("#") / total > rule.max_symbols:
        return "too many hashes"
    if rule.max_symbols and sum(map(text.count, ELLIPSES)) / total > rule.max_symbols:
        return "too many ellipses"
    if reason := _line_quality(text, rule):
        return reason
    if rule.min_alphabetic and np.count_nonzero(found.letters) / total < rule.min_alphabetic:
        return "too few words with a letter"
    if rule.min_stop_words and len(set(rule.stop_words).intersection(words(text))) < rule.min_stop_words:
        return "too few stop words"
    return ""


def _line_quality(text: str, rule: GopherQuality) -> str:
    """Return which rule about the share of certain lines removes a text; empty if none does."""
    lines = text.splitlines()
    # Counting the marks in the whole text is cheap, and each line that a rule looks for has at least one.
    if rule.max_bullet_lines and sum(map(text.count, BULLETS)) >= rule.max_bullet_lines * len(lines):
        bullets = sum(line.lstrip().startswith(BULLETS) for line in lines)
        if bullets / len(lines) > rule.max_bullet_lines:
            return "too many bullets"
    if rule.max_ellipsis_lines and sum(map(text.count, ELLIPSES)) >= rule.max_ellipsis_lines * len(lines):
        cut = sum(line.rstrip().endswith(ELLIPSES) for line in lines)
        if cut / len(lines) > rule.max_ellipsis_lines:
            return "too many lines end with an ellipsis"
    return ""


def repetition(text: str, rule: GopherRepetition) -> str:
    """Return why the repetition rules remove a text; empty if they keep it."""
    if not text:
        return "empty"
    paragraphs = _PARAGRAPHS.split(text.strip())
    number, characters = repeated(paragraphs)
    if rule.paragraphs and number / len(paragraphs) > rule.paragraphs:
        return "repeated paragraphs"
    if rule.paragraph_characters and characters / len(text) > rule.paragraph_characters:
        return "characters of repeated paragraphs"
    lines = _LINES.split(text)
    number, characters = repeated(lines)
    if rule.lines and number / len(lines) > rule.lines:
        return "repeated lines"
    if rule.line_characters and characters / len(text) > rule.line_characters:
        return "characters of repeated lines"
    return _repeated_words(text, rule)


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return how many of the texts repeat an earlier one, and their total characters."""
    seen: set[str] = set()
    number = characters = 0
    if len(set(parts)) == len(parts):
        return 0, 0
    for part in parts:
        if part in seen:
            number = number + 1
            characters = characters + len(part)
        else:
            seen.add(part)
    return number, characters


def _repeated_words(text: str, rule: GopherRepetition) -> str:
    """Return which n-gram rule removes a text; empty if none does."""
    found = counted(text)
    total = len(found.numbers)
    # ends[i] is the number of characters before word i, without spaces.
    ends = np.concatenate([[0], np.cumsum(found.lengths)])
    rows = _Rows(found.numbers)
    for length, share in sorted(rule.top):
        if total < length or not share:
            continue
        at, times = rows.most_frequent(length)
        characters = ends[at + length] - ends[at] + length - 1  # with the spaces between words
        if characters * times / len(text) > share:
            return f"the most frequent {length} words"
    least = min((share for _, share in rule.repeated if share), default=1.0)
    for length, share in sorted(rule.repeated):
        if total < length or rows.characters(length, ends) / len(text) <= least:
            break  # longer n-grams repeat within repeated shorter ones, so they cover no more
        if share and _repeated_characters(rows.of(length), ends, length) / len(text) > share:
            return f"repeated {length} words"
    return ""


class _Repeated(NamedTuple):
    """The n-grams that occur more than once.

    Attributes:
        places: index of each one's first word, ascending, int64.
        rows: a number for each, equal for equal n-grams, int64.
    """

    places: np.ndarray
    rows: np.ndarray


class _Rows:
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
            (places, rows), size = self._repeated[-1], len(self._repeated)
            there = np.searchsorted(places, len(self._numbers) - size)
            # The pair (number of the prefix, next word) identifies an n-gram without hashing.
            keys = rows[:there] * self._words + self._numbers[places[:there] + size]
            self._repeated.append(_repeated(places[:there], keys))
        return self._repeated[length - 1]

    def characters(self, length: int, ends: np.ndarray) -> int:
        """Return the characters covered by repeated n-grams of `length` words; overlaps count once."""
        places = self.of(length).places
        begins = places.copy()
        begins[1:] = np.maximum(places[1:], places[:-1] + length)
        return int((ends[places + length] - ends[begins]).sum())

    def most_frequent(self, length: int) -> tuple[int, int]:
        """Return the first place of the most frequent n-gram of `length` words, and its count."""
        places, rows = self.of(length)
        if not len(rows):
            return 0, 1
        counts = np.bincount(rows)
        most = int(counts.max())
        return int(places[(counts[rows] == most).argmax()]), most


def _repeated(places: np.ndarray, rows: np.ndarray) -> _Repeated:
    """Keep the n-grams that occur more than once, and renumber them from 0."""
    ordered = np.sort(rows)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return _Repeated(twice, twice)
    found = np.minimum(np.searchsorted(twice, rows), len(twice) - 1)
    there = twice[found] == rows
    return _Repeated(places[there], found[there])


def _repeated_characters(found: _Repeated, ends: np.ndarray, length: int) -> int:
    """Return the characters of n-grams that repeat an earlier one; overlapping repetitions count once."""
    seen: set[int] = set()
    characters = at = 0
    for place, row in zip(found.places.tolist(), found.rows.tolist(), strict=True):
        if place < at:
            continue
        if row in seen:
            characters += int(ends[place + length] - ends[place])
            at = place + length
        else:
            seen.add(row)
    return characters

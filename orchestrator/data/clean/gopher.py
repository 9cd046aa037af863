"""The rules of Gopher (Rae et al., 2021, appendix A1.1), in the form that datatrove 0.10 gives them.

Different on purpose: words are those of `words`; n words in a row are equal if all are, where datatrove compares them
joined, so that "ab c" equals "a bc".
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
    """Why the quality rules remove a text; empty if they do not."""
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
    lines = text.splitlines()
    if rule.max_bullet_lines:
        most = rule.max_bullet_lines * len(lines)  # there are no more such lines than such marks
        if sum(map(text.count, BULLETS)) >= most and (
            sum(line.lstrip().startswith(BULLETS) for line in lines) / len(lines) > rule.max_bullet_lines
        ):
            return "too many bullets"
    if rule.max_ellipsis_lines:
        most = rule.max_ellipsis_lines * len(lines)
        if sum(map(text.count, ELLIPSES)) >= most and (
            sum(line.rstrip().endswith(ELLIPSES) for line in lines) / len(lines) > rule.max_ellipsis_lines
        ):
            return "too many lines end with an ellipsis"
    if rule.min_alphabetic and np.count_nonzero(found.letters) / total < rule.min_alphabetic:
        return "too few words with a letter"
    if rule.min_stop_words and len(set(rule.stop_words).intersection(words(text))) < rule.min_stop_words:
        return "too few stop words"
    return ""


def repetition(text: str, rule: GopherRepetition) -> str:
    """Why the repetition rules remove a text; empty if they do not."""
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
    """How many of the texts came before, and their characters."""
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
    found = counted(text)
    total = len(found.numbers)
    ends = np.concatenate([[0], np.cumsum(found.lengths)])
    rows = _Rows(found.numbers)
    for length, share in sorted(rule.top):
        if total < length or not share:
            continue
        at, times = rows.most_frequent(length)
        characters = ends[at + length] - ends[at] + length - 1  # with the spaces between
        if characters * times / len(text) > share:
            return f"the most frequent {length} words"
    least = min((share for _, share in rule.repeated if share), default=1.0)
    for length, share in sorted(rule.repeated):
        if total < length or rows.characters(length, ends) / len(text) <= least:
            break  # nor have longer rows more characters
        if share and _repeated_characters(rows.of(length), ends, length) / len(text) > share:
            return f"repeated {length} words"
    return ""


class _Repeated(NamedTuple):
    """Where the rows of n words begin that are there more than once, in order, and numbers that are equal for equal
    rows, both int64."""

    places: np.ndarray
    rows: np.ndarray


class _Rows:
    """The rows of words of a text, by the number of each word; those of n from those of n - 1, since only within rows
    that are there more than once can longer ones be."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._words = int(numbers.max(initial=0)) + 1
        self._repeated = [_Repeated(np.arange(len(numbers)), numbers)]  # of one word all

    def of(self, length: int) -> _Repeated:
        """The rows of `length` words, 2 at least."""
        while len(self._repeated) < length:
            (places, rows), size = self._repeated[-1], len(self._repeated)
            there = np.searchsorted(places, len(self._numbers) - size)
            keys = rows[:there] * self._words + self._numbers[places[:there] + size]
            self._repeated.append(_repeated(places[:there], keys))
        return self._repeated[length - 1]

    def characters(self, length: int, ends: np.ndarray) -> int:
        """Characters that are in some repeated row of so many words."""
        places = self.of(length).places
        begins = places.copy()
        begins[1:] = np.maximum(places[1:], places[:-1] + length)
        return int((ends[places + length] - ends[begins]).sum())

    def most_frequent(self, length: int) -> tuple[int, int]:
        """Where the first of the most frequent rows of `length` words is, and how often it is there."""
        places, rows = self.of(length)
        if not len(rows):
            return 0, 1
        counts = np.bincount(rows)
        most = int(counts.max())
        return int(places[(counts[rows] == most).argmax()]), most


def _repeated(places: np.ndarray, rows: np.ndarray) -> _Repeated:
    """Those that are there more than once, numbered anew from 0."""
    ordered = np.sort(rows)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return _Repeated(twice, twice)
    found = np.minimum(np.searchsorted(twice, rows), len(twice) - 1)
    there = twice[found] == rows
    return _Repeated(places[there], found[there])


def _repeated_characters(found: _Repeated, ends: np.ndarray, length: int) -> int:
    """Characters of the rows that came before, none counted twice."""
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

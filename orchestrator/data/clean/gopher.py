"""The rules of Gopher (Rae et al., 2021, appendix A1.1), in the form that datatrove 0.10 gives them.

Different on purpose: words are those of `words`; n words in a row are equal if all are, where datatrove compares them
joined, so that "ab c" equals "a bc".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from orchestrator.data.clean.words import PUNCTUATION, words
from orchestrator.job.clean import GopherQuality, GopherRepetition

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
ELLIPSES = ("...", "\u2026")
BULLETS = ("\u2022", "-")


def quality(text: str, rule: GopherQuality) -> str:
    """Why the quality rules remove a text; empty if they do not."""
    counts = Counter(words(text))
    total = sum(counts.values())
    real = {word: n for word, n in counts.items() if not PUNCTUATION.issuperset(word)}
    number = sum(real.values())
    if rule.min_words and number < rule.min_words:
        return "too few words"
    if rule.max_words and number > rule.max_words:
        return "too many words"
    if not number:
        return "no words"
    mean = sum(len(word) * n for word, n in real.items()) / number
    if rule.min_word_length and mean < rule.min_word_length:
        return "words too short"
    if rule.max_word_length and mean > rule.max_word_length:
        return "words too long"
    if rule.max_symbols and text.count("#") / total > rule.max_symbols:
        return "too many hashes"
    if rule.max_symbols and sum(map(text.count, ELLIPSES)) / total > rule.max_symbols:
        return "too many ellipses"
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(BULLETS) for line in lines)
    if rule.max_bullet_lines and bullets / len(lines) > rule.max_bullet_lines:
        return "too many bullets"
    trailing = sum(line.rstrip().endswith(ELLIPSES) for line in lines)
    if rule.max_ellipsis_lines and trailing / len(lines) > rule.max_ellipsis_lines:
        return "too many lines end with an ellipsis"
    with_letter = sum(n for word, n in counts.items() if any(map(str.isalpha, word)))
    if rule.min_alphabetic and with_letter / total < rule.min_alphabetic:
        return "too few words with a letter"
    if rule.min_stop_words and len(counts.keys() & set(rule.stop_words)) < rule.min_stop_words:
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
    for part in parts:
        if part in seen:
            number, characters = number + 1, characters + len(part)
        else:
            seen.add(part)
    return number, characters


def _repeated_words(text: str, rule: GopherRepetition) -> str:
    found = words(text)
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in found], dtype=np.int64)
    ends = np.cumsum([0, *map(len, found)])
    rows = _Rows(ids)
    for length, share in sorted(rule.top):
        if len(found) < length or not share:
            continue
        equal = rows.of(length)
        first, counts = np.unique(equal, return_index=True, return_counts=True)[1:]
        at = first[counts == counts.max()].min()
        characters = ends[at + length] - ends[at] + length - 1  # with the spaces between
        if characters * counts.max() / len(text) > share:
            return f"the most frequent {length} words"
    for length, share in sorted(rule.repeated):
        if len(found) < length:
            break
        if not (characters := _repeated_characters(rows.of(length), ends, length)):
            break  # nor is a longer row repeated
        if share and characters / len(text) > share:
            return f"repeated {length} words"
    return ""


class _Rows:
    """Numbers of the rows of n words, equal for equal ones; those of n from those of n - 1."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids, self._rows, self._length = ids, ids, 1

    def of(self, length: int) -> np.ndarray:
        if length < self._length:
            self._rows, self._length = self._ids, 1
        base = int(self._ids.max()) + 1
        while self._length < length:
            joined = self._rows[:-1] * base + self._ids[self._length :]
            self._rows = np.unique(joined, return_inverse=True)[1]
            self._length += 1
        return self._rows


def _repeated_characters(rows: np.ndarray, ends: np.ndarray, length: int) -> int:
    """Characters of the rows that came before, none counted twice."""
    counts = np.bincount(rows)
    if counts.max() == 1:
        return 0
    seen: set[int] = set()
    characters = at = 0
    candidates = counts[rows] > 1
    places, values = np.flatnonzero(candidates).tolist(), rows[candidates].tolist()
    for place, value in zip(places, values, strict=True):
        if place < at:
            continue
        if value in seen:
            characters += int(ends[place + length] - ends[place])
            at = place + length
        else:
            seen.add(value)
    return characters

"""Words and sentences of a text, for the rules of datatrove and for comparing documents.

datatrove itself uses spaCy's words, whose rules depend on the language. Here a word is a run of letters and digits, a
single ideograph or kana, or a single other character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

KEPT = 2**17
"""Number of distinct words after which the cache of word numbers is cleared."""
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = r"\d+(?:[.,]\d+)+|\w+(?:['\u2019]\w+)*|\.{2,}|[^\w\s]"
_ASCII = re.compile(_WORD, re.ASCII)
_OTHER = re.compile(
    rf"[{_IDEOGRAPHS}]|\d+(?:[.,]\d+)+|[^\W{_IDEOGRAPHS}]+(?:['\u2019][^\W{_IDEOGRAPHS}]+)*|\.{{2,}}|[^\w\s]"
)
_SENTENCE = re.compile(
    r"(?:[!?\u2026\u3002\uff01\uff1f]|(?<!\b[A-Z])\.)[^\w\s]*\s+(?=[^\w\s]*\w)|[\u3002\uff01\uff1f](?=\w)"
)


@lru_cache(maxsize=2)
def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, punctuation included.

    Cached, because several steps need the words of the same text.
    """
    return tuple((_ASCII if text.isascii() else _OTHER).findall(text))


class Counted(NamedTuple):
    """The words of a text, one array entry for each.

    Attributes:
        numbers: equal for equal words of this text, int64.
        lengths: in characters, int64.
        symbols: whether the word is punctuation alone, bool.
        letters: whether the word has a letter, bool.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    symbols: np.ndarray
    letters: np.ndarray


class _Numbers(dict[str, int]):
    """Numbers words, and encodes their kind: four times the length, plus 2 for a symbol, plus 1 for a letter.

    Words recur, so each is classified once.
    """

    def __init__(self) -> None:
        from datatrove.utils.text import PUNCTUATION_SET

        self._kinds = np.zeros(KEPT, np.int64)
        self._punctuation = PUNCTUATION_SET

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        if number == len(self._kinds):
            self._kinds = np.concatenate([self._kinds, np.zeros_like(self._kinds)])
        kind = 4 * len(word) + 2 * self._punctuation.issuperset(word) + any(map(str.isalpha, word))
        self._kinds[number] = kind
        return number

    def of(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of words and their kinds, int64 [words] each."""
        if len(self) > KEPT:
            self.clear()
        result = np.fromiter(map(self.__getitem__, words), np.int64, len(words))
        return result, self._kinds[result]


@lru_cache(maxsize=1)
def _numbers() -> _Numbers:
    return _Numbers()


@lru_cache(maxsize=2)
def counted(text: str) -> Counted:
    """Return the properties of a text's words that the rules use. Cached like `words`."""
    numbers, kinds = _numbers().of(words(text))
    return Counted(numbers, kinds >> 2, (kinds & 2) > 0, (kinds & 1) > 0)


def sentences(line: str) -> int:
    """Return the number of sentences of a line, at least 1."""
    return 1 + sum(1 for _ in _SENTENCE.finditer(line))


@lru_cache(maxsize=2)
def plain_words(text: str) -> tuple[str, ...]:
    """Return the words by which texts are compared: lower case, no punctuation or diacritics, numbers as 0."""
    plain = _simplified(text)
    return tuple(plain.split()) if plain.isascii() else tuple(_OTHER.findall(plain))


def _simplified(text: str) -> str:
    """Return a text as datatrove simplifies it. Its configurations leave out what changes no word."""
    from datatrove.utils.text import simplify_text

    ascii_text, other = _configurations()
    result: str = simplify_text(text, ascii_text if text.isascii() else other)
    return result


@lru_cache(maxsize=1)
def _configurations() -> tuple[Any, Any]:
    from datatrove.utils.text import TextNormConfig

    return tuple(
        TextNormConfig(norm_whitespace=False, norm_unicode_diacritics=marked) for marked in (False, True)
    )

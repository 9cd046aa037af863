"""Words, sentences and punctuation of a text, as in the rules of datatrove (Apache-2.0, version 0.10).

One difference: datatrove uses spaCy's words, whose rules depend on the language. Here a word is a run of letters and
digits, a single ideograph or kana, or a single other character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

TERMINAL = frozenset(
    "!.?\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u07f9\u0837\u0839\u083d\u083e\u0964"
    "\u0965\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u17d6\u17d9\u17da\u1803"
    "\u1809\u1944\u1945\u1aa8\u1aa9\u1aaa\u1aab\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d\u1b7e\u1c3b\u1c3c"
    "\u1c7e\u1c7f\u203c\u203d\u2047\u2048\u2049\u2e2e\u2e3c\u2e53\u2e54\u3002\ua4ff\ua60e\ua60f"
    "\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d\uaa5e\uaa5f\uaaf0\uaaf1\uabeb"
    "\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61\U00010a56\U00010a57\U00010f55\U00010f56\U00010f57"
    "\U00010f58\U00010f59\U00010f86\U00010f87\U00010f88\U00010f89\U00011047\U00011048\U000110be"
    "\U000110bf\U000110c0\U000110c1\U00011141\U00011142\U00011143\U000111c5\U000111c6\U000111cd"
    "\U000111de\U000111df\U00011238\U00011239\U0001123b\U0001123c\U000112a9\U0001144b\U0001144c"
    "\U000115c2\U000115c3\U000115c9\U000115ca\U000115cb\U000115cc\U000115cd\U000115ce\U000115cf"
    "\U000115d0\U000115d1\U000115d2\U000115d3\U000115d4\U000115d5\U000115d6\U000115d7\U00011641"
    "\U00011642\U0001173c\U0001173d\U0001173e\U00011944\U00011946\U00011a42\U00011a43\U00011a9b"
    "\U00011a9c\U00011c41\U00011c42\U00011ef7\U00011ef8\U00011f43\U00011f44\U00016a6e\U00016a6f"
    "\U00016af5\U00016b37\U00016b38\U00016b44\U00016e98\U0001bc9f\U0001da88"
)
"""Characters that end a sentence: Unicode's property Sentence_Terminal."""
CONTROLS = "".join(map(chr, (*range(9), 11, 12, *range(13, 32), *range(127, 160))))
MARKS = (
    "!\u0022#$%&'()*+,-./:;<=>?@[\u005c]^_`{|}~\u00ab\u00b4\u00bb\u2013\u2014\u2019\u201c\u201d"
    "\u201e\u2026\u2236\u2501\u25ba\u3001\u3002\u3008\u3009\u300a\u300b\u300c\u300d\u3010\u3011"
    "\uff01\uff05\uff08\uff09\uff0c\uff0e\uff11\uff1a\uff1b\uff1f\uff5e" + CONTROLS
)
"""Characters that separate words when texts are compared."""
PUNCTUATION = frozenset(MARKS) | TERMINAL
"""A word of these characters alone is a symbol."""
KEPT = 2**17
"""Number of distinct words after which the cache of word numbers is cleared."""
_AS_SPACES = str.maketrans(MARKS, " " * len(MARKS))
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = r"\d+(?:[.,]\d+)+|\w+(?:['\u2019]\w+)*|\.{2,}|[^\w\s]"
_ASCII = re.compile(_WORD, re.ASCII)
_OTHER = re.compile(
    rf"[{_IDEOGRAPHS}]|\d+(?:[.,]\d+)+|[^\W{_IDEOGRAPHS}]+(?:['\u2019][^\W{_IDEOGRAPHS}]+)*|\.{{2,}}|[^\w\s]"
)
_SENTENCE = re.compile(
    r"(?:[!?\u2026\u3002\uff01\uff1f]|(?<!\b[A-Z])\.)[^\w\s]*\s+(?=[^\w\s]*\w)|[\u3002\uff01\uff1f](?=\w)"
)
_NUMBER = re.compile(r"\d+(?:[.,\u060c\u066b\u2396\u2397\u2398]\d+)?")


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
        self._kinds = np.zeros(KEPT, np.int64)

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        if number == len(self._kinds):
            self._kinds = np.concatenate([self._kinds, np.zeros_like(self._kinds)])
        kind = 4 * len(word) + 2 * PUNCTUATION.issuperset(word) + any(map(str.isalpha, word))
        self._kinds[number] = kind
        return number

    def of(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of words and their kinds, int64 [words] each."""
        if len(self) > KEPT:
            self.clear()
        found = np.fromiter(map(self.__getitem__, words), np.int64, len(words))
        return found, self._kinds[found]


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
    text = _NUMBER.sub("0", text.lower()).translate(_AS_SPACES)
    if text.isascii():
        return tuple(text.split())
    marked = unicodedata.normalize("NFD", text)
    return tuple(_OTHER.findall("".join(c for c in marked if unicodedata.category(c) != "Mn")))

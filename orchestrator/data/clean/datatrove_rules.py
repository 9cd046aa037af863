"""Rules of Gopher, C4, FineWeb and personal data. The filters of datatrove decide those that are not decided here.

This is the only module that imports datatrove's filters, an optional library. A filter takes a tokenizer in place of a
language, so it judges the words and sentences of `words` here, and not those of spaCy.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
from datatrove.pipeline.formatters.pii import PIIFormatter, PIIReplacer
from datatrove.utils.word_tokenizers import WordTokenizer

from orchestrator.data.clean.config import C4, FineWeb, GopherQuality, GopherRepetition, Pii
from orchestrator.data.clean.document_rules import Decide, Row
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.words import counted, sentences, words


def repeated_words(text: str, rule: GopherRepetition) -> str:
    """Return which rule about repeated words removes a text; empty if none does (Rae et al., 2021, appendix A1.1).

    datatrove's filter joins the words of an n-gram before it compares them, so that "ab c" equals "a bc", and removes
    tables of numbers in which nothing repeats. Here two n-grams are equal only if each of their words is.
    """
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


ELLIPSES = ("...", "\u2026")
BULLETS = ("\u2022", "-")


def quality(text: str, rule: GopherQuality) -> str:
    """Return why the quality rules of Gopher remove a text; empty if they keep it (Rae et al., 2021, appendix A1.1).

    datatrove's filter comes to the same decisions, in more than twice the time: it looks at each character of each word
    in Python, where a word that recurs is looked at once here. It divides by zero for a text without words.
    """
    counts = counted(text)
    total = len(counts.numbers)
    lengths = counts.lengths[~counts.symbols]
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
    if rule.min_alphabetic and np.count_nonzero(counts.letters) / total < rule.min_alphabetic:
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


REASONS = {
    "dup_para_frac": "repeated paragraphs",
    "dup_para_char_frac": "characters of repeated paragraphs",
    "dup_line_frac": "repeated lines",
    "dup_line_char_frac": "characters of repeated lines",
    "lorem_ipsum": "lorem ipsum",
    "curly_bracket": "a curly bracket",
    "too_few_sentences": "too few sentences",
    "empty": "empty",
    "line_punct_ratio": "too few lines end a sentence",
    "short_line_ratio": "too many short lines",
    "char_dup_ratio": "repeated lines",
    "list_ratio": "too many line ends",
}
"""The reasons of the reports, by those of datatrove."""
PHONE = re.compile(
    r"(?<![\w.])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}|\(\d{3}\) ?\d{3}[ .-]\d{4}"
    r"|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|\.\d)"
)
INSTEAD = {"email": "email@example.com", "ip": "192.0.2.1", "phone": "555-0100"}
"""Addresses and numbers reserved for examples (RFC 2606, RFC 5737)."""


class _Words(WordTokenizer):
    """The words and the number of sentences that the filters ask for."""

    def word_tokenize(self, text: str) -> Any:
        return words(text)

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError  # filters of lines take spans

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        # The filters only count the spans.
        return [(0, len(text))] * sentences(text)


@lru_cache(maxsize=1)
def _words() -> _Words:
    return _Words()


def gopher_quality(rule: GopherQuality) -> Decide:
    """Return a step with the quality rules of Gopher, which are decided here, see `gopher_quality`."""
    return lambda text, row: Removed(reason) if (reason := quality(text, rule)) else text


def gopher_repetition(rule: GopherRepetition) -> Decide:
    """Return a step with the repetition rules of Gopher. Repeated words are counted here, see `repeated_words`."""
    judge = GopherRepetitionFilter(
        dup_line_frac=rule.lines,
        dup_para_frac=rule.paragraphs,
        dup_line_char_frac=rule.line_characters,
        dup_para_char_frac=rule.paragraph_characters,
        top_n_grams=(),
        dup_n_grams=(),
        language=_words(),
    )

    def decide(text: str, row: Row) -> str | Removed:
        after = _judged(judge, text)
        if not isinstance(after, Removed) and (reason := repeated_words(text, rule)):
            return Removed(reason)
        return after

    return decide


def c4(rule: C4) -> Decide:
    """Return a step that keeps the lines of a document that C4 keeps, or removes it."""
    judge = C4QualityFilter(
        remove_citations=rule.citations,
        filter_no_terminal_punct=rule.terminal_punctuation,
        min_num_sentences=rule.min_sentences,
        min_words_per_line=rule.min_words_per_line,
        max_word_length=rule.max_word_length or -1,
        filter_lorem_ipsum=rule.lorem_ipsum,
        filter_javascript=rule.javascript,
        filter_curly_bracket=rule.curly_bracket,
        filter_policy=rule.policy,
        language=_words(),
    )
    # It counts each line by what it does with it. Nobody reads the counts, and they take half of its time.
    judge.stat_update = lambda *labels, **options: None
    return lambda text, row: _judged(judge, text)


def fineweb(rule: FineWeb) -> Decide:
    """Return a step with the rules that FineWeb adds."""
    judge = FineWebQualityFilter(
        line_punct_thr=rule.min_punctuated_lines,
        short_line_thr=rule.max_short_lines,
        short_line_length=rule.short_line,
        char_duplicates_ratio=rule.max_repeated,
        new_line_ratio=rule.max_line_ends,
        language=_words(),
    )
    return lambda text, row: _judged(judge, text)


def pii(rule: Pii) -> Decide:
    """Return a step that replaces personal data, or removes documents that contain some."""
    # With several replacements, the one that datatrove takes would depend on earlier documents.
    theirs = PIIFormatter(email_replacement=INSTEAD["email"], ip_replacement=INSTEAD["ip"])
    if rule.private_ips:
        theirs.ip_replacer.validator = None
    replacers = {
        "email": theirs.emails_replacer,
        "ip": theirs.ip_replacer,
        "phone": PIIReplacer(PHONE, INSTEAD["phone"]),
    }

    def decide(text: str, row: Row) -> str | Removed:
        for kind in rule.kinds:
            after = replacers[kind].replace(text)
            if after != text and rule.action == "drop":
                return Removed(kind)
            text = after
        return text

    return decide


def _judged(judge: Any, text: str) -> str | Removed:
    """Return what a filter keeps of a text, or why it removes it."""
    document = Document(text=text, id="")
    result = judge.filter(document)
    return document.text if result is True else Removed(REASONS[result[1]])

"""Rules that the filters of datatrove decide: repeated lines (Gopher), C4, FineWeb, and personal data.

This is the only module that imports datatrove's filters, an optional library. A filter takes a tokenizer in place of a
language, so it judges the words and sentences of `words` here, and not those of spaCy.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
from datatrove.pipeline.formatters.pii import PIIFormatter, PIIReplacer
from datatrove.utils.word_tokenizers import WordTokenizer

from orchestrator.data.clean.config import C4, FineWeb, GopherQuality, GopherRepetition, Pii
from orchestrator.data.clean.document_rules import Decide, Row
from orchestrator.data.clean.gopher_quality import quality
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.repeated_words import repeated_words
from orchestrator.data.clean.words import sentences, words

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

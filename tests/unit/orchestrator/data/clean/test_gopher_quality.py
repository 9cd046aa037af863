"""The quality rules of Gopher decide as datatrove's filter does."""

from __future__ import annotations

import pytest
from cleaning_texts import EACH, texts
from datatrove.data import Document
from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter

from orchestrator.data.clean.config import GopherQuality
from orchestrator.data.clean.datatrove_rules import _words, quality
from orchestrator.data.clean.words import words

REASONS = {
    "gopher_short_doc": "too few words",
    "gopher_long_doc": "too many words",
    "gopher_below_avg_threshold": "words too short",
    "gopher_above_avg_threshold": "words too long",
    "gopher_too_many_hashes": "too many hashes",
    "gopher_too_many_ellipsis": "too many ellipses",
    "gopher_too_many_bullets": "too many bullets",
    "gopher_too_many_end_ellipsis": "too many lines end with an ellipsis",
    "gopher_below_alpha_threshold": "too few words with a letter",
    "gopher_enough_stop_words": "too few stop words",
}
THEIR_NAMES = {
    "min_words": "min_doc_words",
    "max_words": "max_doc_words",
    "min_word_length": "min_avg_word_length",
    "max_word_length": "max_avg_word_length",
    "max_symbols": "max_symbol_word_ratio",
    "max_bullet_lines": "max_bullet_lines_ratio",
    "max_ellipsis_lines": "max_ellipsis_lines_ratio",
    "min_alphabetic": "max_non_alpha_words_ratio",
    "min_stop_words": "min_stop_words",
}


def theirs(judge: GopherQualityFilter, text: str) -> str:
    found = judge.filter(Document(text=text, id=""))
    return "" if found is True else REASONS[found[1]]


@EACH
def test_decisions_and_reasons_are_those_of_datatrove(package: str) -> None:
    judge = GopherQualityFilter(language=_words())
    seen = set()
    for text in texts(package):
        if words(text):  # theirs divides by their number
            found = theirs(judge, text)
            assert quality(text, GopherQuality()) == found, text[:200]
            seen.add(found)
    assert package or len(seen) > 6


@pytest.mark.parametrize("name", THEIR_NAMES)
def test_a_rule_decides_as_theirs_when_it_is_alone(name: str) -> None:
    value = {"max_words": 60, "min_stop_words": 6}.get(name, GopherQuality.model_fields[name].default)
    rule = GopherQuality(**{**dict.fromkeys(THEIR_NAMES, 0), name: value})
    given = {other: value if ours == name else None for ours, other in THEIR_NAMES.items()}
    judge = GopherQualityFilter(**given, language=_words())
    decided = set()
    for text in texts():
        if words(text) and quality(text, rule) != "no words":
            found = theirs(judge, text)
            assert quality(text, rule) == found, text[:200]
            decided.add(found)
    assert len(decided) > 1

from __future__ import annotations

import random

import datatrove.pipeline.filters.gopher_quality_filter as their_quality
import datatrove.pipeline.filters.gopher_repetition_filter as their_repetition
import pytest
from cleaning_texts import EACH, PROSE, texts
from datatrove.data import Document

from orchestrator.data.clean.config import GopherQuality, GopherRepetition
from orchestrator.data.clean.gopher import quality, repetition
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
    "dup_para_frac": "repeated paragraphs",
    "dup_para_char_frac": "characters of repeated paragraphs",
    "dup_line_frac": "repeated lines",
    "dup_line_char_frac": "characters of repeated lines",
    "empty": "empty",
    **{f"top_{n}_gram": f"the most frequent {n} words" for n in range(2, 5)},
    **{f"duplicated_{n}_n_grams": f"repeated {n} words" for n in range(5, 11)},
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


@pytest.fixture(autouse=True)
def _our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are what differs on purpose."""
    for module in (their_quality, their_repetition):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: list(words(text)))


def reason_of(found: bool | tuple[bool, str]) -> str:
    return "" if found is True else REASONS[found[1]]  # type: ignore[index]


@EACH
def test_decisions_and_reasons_are_those_of_datatrove(package: str) -> None:
    quality_filter = their_quality.GopherQualityFilter()
    repetition_filter = their_repetition.GopherRepetitionFilter()
    seen = set()
    for text in texts(package):
        theirs = reason_of(repetition_filter.filter(Document(text=text, id="")))
        assert repetition(text, GopherRepetition()) == theirs, text[:200]
        seen.add(theirs)
        if words(text):  # theirs divides by their number
            theirs = reason_of(quality_filter.filter(Document(text=text, id="")))
            assert quality(text, GopherQuality()) == theirs, text[:200]
            seen.add(theirs)
    assert package or len(seen) > 12


def test_every_rule_decides_as_theirs_when_it_is_alone() -> None:
    off = dict.fromkeys(THEIR_NAMES, 0)
    for name in off:
        value = {"max_words": 60, "min_stop_words": 6}.get(name, GopherQuality.model_fields[name].default)
        rule = GopherQuality(**{**off, name: value})
        theirs = their_quality.GopherQualityFilter(
            **{theirs: value if ours == name else None for ours, theirs in THEIR_NAMES.items()}
        )
        decided = set()
        for text in texts():
            if words(text) and quality(text, rule) != "no words":
                found = reason_of(theirs.filter(Document(text=text, id="")))
                assert quality(text, rule) == found, (name, text[:200])
                decided.add(found)
        assert len(decided) > 1, name


def test_repeated_words_are_counted_as_by_theirs_on_random_texts() -> None:
    draw = random.Random(3)
    off = {"lines": 0, "paragraphs": 0, "line_characters": 0, "paragraph_characters": 0}
    their_off = dict.fromkeys(("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"))
    decided = set()
    for _ in range(200):
        text = " ".join(
            draw.choice(PROSE.split()[: draw.randint(2, 40)]) for _ in range(draw.randint(1, 120))
        )
        for length in range(2, 11):
            share = draw.uniform(0.02, 0.4)
            for top in (True, False):
                one, none = [(length, share)], []
                ours = repetition(
                    text, GopherRepetition(top=one if top else none, repeated=none if top else one, **off)
                )
                theirs = their_repetition.GopherRepetitionFilter(
                    top_n_grams=one if top else none, dup_n_grams=none if top else one, **their_off
                ).filter(Document(text=text, id=""))
                assert (ours == "") == (theirs is True), (length, share, top, text)
                decided.add((top, ours == ""))
    assert len(decided) == 4


def test_nothing_is_asked_of_a_text_without_words() -> None:
    assert quality("", GopherQuality(min_words=0)) == "no words"
    assert quality("!!! ...", GopherQuality(min_words=None)) == "no words"
    assert repetition("", GopherRepetition()) == "empty"

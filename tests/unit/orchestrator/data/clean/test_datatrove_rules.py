"""Decisions by the filters of datatrove: equal to those of the rules that stood here before, and guarded."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from cleaning_texts import PROSE, planted
from datatrove.data import Document
from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
from datatrove.pipeline.formatters.pii import PIIFormatter

from orchestrator.config.errors import InputError
from orchestrator.data.clean import datatrove_rules
from orchestrator.data.clean.config import CleanStep, GopherQuality, GopherRepetition, Pii
from orchestrator.data.clean.plan import BY_DATATROVE, check_steps
from orchestrator.data.clean.removed import Removed
from orchestrator.data.config import DataSpec

LOOSE = {
    "max_word_length": None, "min_sentences": 0, "citations": False, "terminal_punctuation": False,
    "curly_bracket": False, "javascript": False, "policy": False, "lorem_ipsum": False, "min_words_per_line": 0,
}  # fmt: skip
STRICT = {
    "min_words": 0, "max_words": 60, "min_word_length": None, "max_symbols": 0, "max_bullet_lines": 0.2,
    "min_stop_words": 0, "min_alphabetic": 0.6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "counts", "digest"),
    [
        ("gopher_quality", {"too few words": 9, "kept": 36, "too few words with a letter": 2, "too many ellipses": 2,
         "too many lines end with an ellipsis": 2, "too many bullets": 1, "words too short": 2, "words too long": 1},
         "d8ea1ce2"),
        ({"gopher_quality": STRICT}, {"kept": 8, "too many words": 42, "words too long": 1, "no words": 3,
         "too few words with a letter": 1}, "509abe77"),
        ("gopher_repetition", {"kept": 37, "the most frequent 2 words": 6, "repeated 5 words": 1,
         "characters of repeated lines": 3, "characters of repeated paragraphs": 2, "repeated lines": 3,
         "repeated paragraphs": 2, "the most frequent 3 words": 1}, "98b4d43b"),
        ({"gopher_repetition": {"lines": 0, "top": [[4, 0.1], [2, 0], [3, 0.1]], "repeated": [[9, 0.05], [6, 0.1]]}},
         {"kept": 36, "the most frequent 3 words": 7, "repeated 9 words": 2, "repeated 6 words": 1,
          "characters of repeated lines": 5, "characters of repeated paragraphs": 2, "repeated paragraphs": 2},
         "2a17c9f2"),
        ("c4", {"too few sentences": 20, "kept": 14, "changed": 19, "lorem ipsum": 1,
         "a curly bracket": 1}, "062bb23b"),
        ({"c4": LOOSE}, {"kept": 46, "changed": 9}, "66e743ed"),
        ("fineweb", {"too few lines end a sentence": 17, "kept": 22, "repeated lines": 11, "too many short lines": 2,
         "too many line ends": 1, "empty": 2}, "071a5fa4"),
    ],
)  # fmt: skip
def test_decisions_and_texts_are_those_of_data_that_is_prepared_already(
    step: Any, counts: Mapping[str, int], digest: str
) -> None:
    """The counts and the digest of all decisions were taken from the rules that stood here before."""
    found = CleanStep.model_validate(step)
    decide = getattr(datatrove_rules, found.name)(found.options)
    decisions = []
    for text in planted():
        after = decide(text, {})
        if isinstance(after, Removed):
            decisions.append(after.reason)
        else:
            decisions.append("=" if after == text else hashlib.md5(after.encode()).hexdigest())
    named = Counter("kept" if each == "=" else "changed" if len(each) == 32 else each for each in decisions)
    assert named == counts
    assert hashlib.md5("\n".join(decisions).encode()).hexdigest()[:8] == digest


def test_a_text_without_words_has_a_reason_where_datatrove_divides_by_zero() -> None:
    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning):
        GopherQualityFilter(min_doc_words=0, language=datatrove_rules._words()).filter(
            Document(text="", id="")
        )
    assert datatrove_rules.gopher_quality(GopherQuality(min_words=0))("", {}) == Removed("no words")
    assert datatrove_rules.gopher_quality(GopherQuality(min_words=None))("!!! ...", {}) == Removed("no words")
    assert datatrove_rules.gopher_quality(GopherQuality())("!!! ...", {}) == Removed("too few words")
    assert datatrove_rules.gopher_repetition(GopherRepetition())("", {}) == Removed("empty")


@pytest.mark.parametrize(
    ("text", "public", "all_of_them"),
    [
        ("Write to a.b+c@mail.example.org, or x@y.co.", "Write to email@example.com, or email@example.com.", ""),
        ("From 8.8.8.8 to 10.0.0.1.", "From 192.0.2.1 to 10.0.0.1.", "From 192.0.2.1 to 192.0.2.1."),
        ("No @ here, 1.2.3 neither.", "No @ here, 1.2.3 neither.", ""),
        ("user@[192.168.2.1], 8.8.4.4", "email@example.com, 192.0.2.1", ""),
        ("x 08.8.8.8", "x 08.8.8.8", "x 192.0.2.1"),
        ("a@b.c <me@there.de>", "email@example.com <email@example.com>", ""),
    ],
)  # fmt: skip
def test_addresses_are_replaced(text: str, public: str, all_of_them: str) -> None:
    assert datatrove_rules.pii(Pii())(text, {}) == public
    assert datatrove_rules.pii(Pii(private_ips=True))(text, {}) == (all_of_them or public)
    dropped = datatrove_rules.pii(Pii(action="drop"))(text, {})
    assert isinstance(dropped, Removed) == (public != text)


def test_a_replacement_does_not_depend_on_earlier_documents() -> None:
    """datatrove takes its replacements in turns, so that a document differs by the part that it is in."""
    theirs = PIIFormatter()
    assert theirs.format("a@b.de") != theirs.format("a@b.de")
    ours = datatrove_rules.pii(Pii())
    assert ours("a@b.de", {}) == ours("a@b.de", {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Call +49 30 1234567 now", True), ("call (212) 555-0199.", True), ("212-555-0199", True),
        ("+1 212 555 0199", True),
        ("in 2020-2021, pages 100-200", False), ("version 1.2.3, 3.14159265", False), ("12345678901", False),
        ("2026-11-22 20:15", False), ("a-212-555-0199-b", False), ("ISBN 978-3-16-148410-0", False),
    ],
)  # fmt: skip
def test_telephone_numbers(text: str, found: bool) -> None:
    drop = datatrove_rules.pii(Pii(kinds=["phone"], action="drop"))
    assert (drop(text, {}) == Removed("phone")) is found
    assert ("555-0100" in datatrove_rules.pii(Pii(kinds=["phone"]))(text, {})) is found


@pytest.mark.parametrize(
    "step", [*BY_DATATROVE, "near_duplicates", {"decontaminate": {"sources": [{"uri": "x"}]}}]
)
@pytest.mark.parametrize("missing", ["datatrove", "regex"])
def test_a_missing_extra_is_one_line(step: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "datatrove"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    data = DataSpec(sources=[{"uri": "x.txt"}], tokenizer={"train_bpe": 300}, sequence_length=8, clean=[step])
    with pytest.raises(
        InputError, match=r"^data.clean: \w+ needs datatrove; install it: pip install .*\[clean\]"
    ):
        check_steps(data)


def test_prose_is_kept_by_all() -> None:
    for name in BY_DATATROVE:
        step = CleanStep.model_validate(name)
        assert getattr(datatrove_rules, name)(step.options)(PROSE, {}) == PROSE

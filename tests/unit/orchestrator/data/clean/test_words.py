from __future__ import annotations

import pytest
from cleaning_texts import PROSE

from orchestrator.data.clean.words import plain_words, sentences, words


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("One.", 1), ("One. Two.", 2), ("One! Two? Three...", 3), ("Version 3.5 of a.b is out.", 1), (PROSE, 6),
        ('He said "no." Then he left.', 2), ("By J. Smith.", 1), ("", 1), ("\u4f60\u597d\u3002\u4e16\u754c\u3002", 2),
    ],
)  # fmt: skip
def test_sentences_are_counted(line: str, count: int) -> None:
    assert sentences(line) == count


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Don't pay 3.50!", ("Don't", "pay", "3.50", "!")),
        ("d\u00e9j\u00e0 \u4f60\u597d...", ("d\u00e9j\u00e0", "\u4f60", "\u597d", "...")),
    ],
)
def test_words_are_found_without_a_language(text: str, found: tuple[str, ...]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Don't pay 3.50!\tNow", ("don", "t", "pay", "0", "now")),
        ("D\u00e9j\u00e0 \u4f60\u597d\u2026 \u0663", ("deja", "\u4f60", "\u597d", "0")),
        (" \n", ()),
    ],
)
def test_texts_are_compared_by_plain_words(text: str, found: tuple[str, ...]) -> None:
    assert plain_words(text) == found

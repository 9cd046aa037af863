"""Pieces of an answer while it grows: together the answer, and nothing of the stop string."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.evaluate.speaker import _Pieces

LETTERS: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))
"""A tokenizer of one letter each."""


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("abc", ["abc"], ""),
        ("STOP", ["STOP"], ""),
        ("xSTOPy", ["STOP"], "x"),
        ("ab", ["abc"], "ab"),
        ("abxabc", ["abc", "q"], "abx"),
        ("", ["abc"], ""),
    ],
)
def test_no_piece_has_a_part_of_the_stop_string(text: str, stop: list[str], wanted: str) -> None:
    heard: list[str] = []
    pieces = _Pieces(LETTERS, heard.append, stop)
    ids = [ord(letter) for letter in text]
    count = next((n for n in range(1, len(ids) + 1) if pieces.more(ids[:n])), len(ids))
    assert pieces.last(ids[:count])[0] == wanted
    assert "".join(heard) == wanted

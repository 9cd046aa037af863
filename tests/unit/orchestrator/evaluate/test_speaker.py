"""Pieces of an answer while it grows: together the answer, and nothing of the stop string."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.evaluate.speaker import _Pieces, speaker_of
from workloads.describe import describe

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


def test_a_model_that_generates_no_text_is_refused_before_its_weights_are_read() -> None:
    """And not at the first message, for want of a chat template."""
    config = describe("bert-tiny", objective="sequence_classification", vocab_size=100)
    classifier: Any = SimpleNamespace(config=config)
    with pytest.raises(
        InputError, match=r"^runs/a: bert \(encoder with head sequence\) generates no text; use a"
    ):
        speaker_of("runs/a", classifier, pytest.fail, LETTERS, None)

from __future__ import annotations

import datatrove.pipeline.filters.c4_filters as their_c4
import datatrove.pipeline.filters.fineweb_quality_filter as their_fineweb
import pytest
from cleaning_texts import EACH, PROSE, texts
from datatrove.data import Document

from orchestrator.data.clean.config import C4, FineWeb
from orchestrator.data.clean.passes import c4, fineweb
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.words import sentences, words

REASONS = {
    "lorem_ipsum": "lorem ipsum",
    "curly_bracket": "a curly bracket",
    "too_few_sentences": "too few sentences",
    "empty": "empty",
    "line_punct_ratio": "too few lines end a sentence",
    "short_line_ratio": "too many short lines",
    "char_dup_ratio": "repeated lines",
    "list_ratio": "too many line ends",
}


@EACH
def test_c4_keeps_the_lines_that_datatrove_keeps(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(their_c4, "split_into_sentences", lambda text, language: [text] * sentences(text))
    theirs, seen = their_c4.C4QualityFilter(), set()
    for text in texts(package):
        document = Document(text=text, id="")
        found = theirs.filter(document)
        ours = c4(text, C4())
        assert ours == (document.text if found is True else Removed(REASONS[found[1]])), text[:200]
        seen.add(ours if isinstance(ours, Removed) else "kept")
    assert package or len(seen) == 4


@EACH
def test_fineweb_decides_as_datatrove(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(their_fineweb, "split_into_words", lambda text, language: list(words(text)))
    theirs, seen = their_fineweb.FineWebQualityFilter(), set()
    for text in texts(package):
        found = theirs.filter(Document(text=text, id=""))
        ours = fineweb(text, FineWeb())
        assert ours == ("" if found is True else REASONS[found[1]]), text[:200]
        seen.add(ours)
    assert package or len(seen) == 6


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("One.", 1), ("One. Two.", 2), ("One! Two? Three...", 3), ("Version 3.5 of a.b is out.", 1), (PROSE, 6),
        ('He said "no." Then he left.', 2), ("By J. Smith.", 1), ("", 1), ("\u4f60\u597d\u3002\u4e16\u754c\u3002", 2),
    ],
)  # fmt: skip
def test_sentences_are_counted(line: str, count: int) -> None:
    assert sentences(line) == count

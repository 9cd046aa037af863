"""The page of things that are taken for granted: it is up to date, its tests exist, and the guides say so."""

from __future__ import annotations

import differences
import granted
import pytest


def test_the_page_is_what_the_table_says() -> None:
    """`python tests/granted.py` writes it."""
    assert granted.PAGE.read_text() == granted.page()
    assert len(granted.THINGS) >= 30


@pytest.mark.parametrize("thing", granted.THINGS, ids=lambda thing: thing.name)
def test_a_guide_says_it_and_a_test_holds_it(thing: granted.Thing) -> None:
    assert thing.words in (differences.ROOT / "docs" / thing.said).read_text()
    assert bool(thing.test) != thing.how.startswith("no: ")
    assert not thing.test or differences.words_of(thing.test), thing.test

"""The page of requests: each is held by a test that names it, and the page is up to date."""

from __future__ import annotations

import re

import asks
import differences
import pytest


def test_the_page_is_what_the_table_says() -> None:
    """`python tests/asks.py` writes it."""
    assert asks.PAGE.read_text() == asks.page()


@pytest.mark.parametrize("ask", asks.ASKS, ids=lambda ask: ask.thread)
def test_the_test_of_a_request_names_it(ask: asks.Ask) -> None:
    assert re.search(rf"(?<!\w){re.escape(ask.thread)}(?!\d)", differences.words_of(ask.test)), ask.test


def test_no_request_stands_twice() -> None:
    elsewhere = ", ".join([*asks.NOT_HERE.values(), asks.UNREAD]).split(", ")
    threads = [*(ask.thread for ask in asks.ASKS), *elsewhere]
    assert len(threads) == len(set(threads))

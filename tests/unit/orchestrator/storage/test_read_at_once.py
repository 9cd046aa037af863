"""Many reads at once: their order, how far they run ahead, and what they raise."""

from __future__ import annotations

from itertools import islice
from threading import Barrier

import pytest

from orchestrator.storage.read_at_once import AT_ONCE, read_at_once


def test_what_is_read_comes_in_the_order_of_the_items() -> None:
    assert list(read_at_once(lambda number: number**2, range(100))) == [number**2 for number in range(100)]
    assert list(read_at_once(str, range(100), held=7)) == [str(number) for number in range(100)]
    assert list(read_at_once(str, iter(()))) == []


def test_reads_are_under_way_together() -> None:
    together = Barrier(AT_ONCE, timeout=10)
    assert len(set(read_at_once(lambda _: together.wait(), range(AT_ONCE)))) == AT_ONCE


def test_no_more_is_read_than_is_held() -> None:
    read: list[int] = []
    found = read_at_once(read.append, range(100), held=4)
    assert list(islice(found, 5)) == [None] * 5
    assert set(range(5)) <= set(read) <= set(range(8))


def test_what_a_read_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(read_at_once(lambda number: 1 // number, (2, 1, 0)))

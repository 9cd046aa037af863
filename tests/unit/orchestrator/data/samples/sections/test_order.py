from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data.samples.sections.order import SectionedOrder

COUNTS = [[3, 10], [3, 40], [57, 41], [57, 41], [91, 90]]
"""Samples of each source up to the end of each section; one section has none."""


def ends_of(counts: Sequence[Sequence[int]], upto: int | None = None) -> Callable[[int], Sequence[int]]:
    """The ends of the sections, of which only those before `upto` are there."""

    def ends(section: int) -> Sequence[int]:
        assert upto is None or section < upto, "not prepared yet"
        return counts[section]

    return ends


def test_an_epoch_has_every_sample_once_section_after_section() -> None:
    order = SectionedOrder(7, len(COUNTS), ends_of(COUNTS), [1.0, 1.0])
    assert (order.samples, order.epoch_size) == ([91, 90], 181)
    for epoch in range(3):
        turns, ids = order.at(np.arange(181 * epoch, 181 * (epoch + 1)))
        assert set(turns) == {epoch}
        assert len(set(ids)) == 181
        source, index = ids % 2, ids // 2
        for before, after in pairwise([[0, 0], *COUNTS]):
            size = sum(after) - sum(before)
            begin = sum(before)
            for number in (0, 1):
                found = index[begin : begin + size][source[begin : begin + size] == number]
                assert sorted(found) == list(range(before[number], after[number]))


def test_epochs_and_sections_are_shuffled_differently() -> None:
    order = SectionedOrder(7, 2, ends_of([[50], [100]]), [1.0])
    first, second = (order.at(np.arange(100 * epoch, 100 * epoch + 100))[1] for epoch in (0, 1))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[:50], first[50:] - 50)
    assert not np.array_equal(first[:50], np.arange(50))


@pytest.mark.parametrize("upto", range(1, len(COUNTS) + 1))
def test_what_is_prepared_so_far_has_the_order_that_all_of_it_has(upto: int) -> None:
    whole = SectionedOrder(3, len(COUNTS), ends_of(COUNTS), [2.0, 0.5])
    growing = SectionedOrder(3, len(COUNTS), ends_of(COUNTS, upto), [2.0, 0.5])
    known = sum(
        2 * COUNTS[upto - 1][0:1][0:1][0] if number == 0 else COUNTS[upto - 1][1] // 2 for number in (0, 1)
    )
    for position in range(known):
        assert [int(v) for v in growing.at(position)] == [int(v) for v in whole.at(position)]
    if upto < len(COUNTS) and known < whole.epoch_size:
        with pytest.raises(AssertionError, match="not prepared yet"):
            growing.at(known)


def test_weights_are_passes_over_each_section() -> None:
    order = SectionedOrder(1, len(COUNTS), ends_of(COUNTS), [2.0, 0.5])
    assert order.epoch_size == 2 * 91 + 45
    turns, ids = order.at(np.arange(order.epoch_size * 2))
    of_first = ids[: order.epoch_size] % 2 == 0
    _, counts = np.unique(ids[: order.epoch_size][of_first], return_counts=True)
    assert set(counts) == {2}
    assert len(counts) == 91
    # two epochs at half a pass are one pass, but for a sample of sections with an odd number of them
    halves = ids[ids % 2 == 1]
    assert len(np.unique(halves)) >= 90 - len(COUNTS)
    assert set(turns[ids % 2 == 0]) == {0, 1, 2, 3}
    assert order.drawn(order.epoch_size) == [182, 45]
    assert sum(order.drawn(100)) in range(98, 101)


def resumes_exactly_once(cases: int) -> None:
    """Steps of 8 samples from random positions on, at random widths, by new processes: what one process reads."""
    rng = random.Random(4)
    whole = SectionedOrder(9, len(COUNTS), ends_of(COUNTS), [1.0, 2.0]).at(np.arange(1200))[1]
    for _ in range(cases):
        order = SectionedOrder(9, len(COUNTS), ends_of(COUNTS), [1.0, 2.0])
        position, width = rng.randrange(1192), rng.choice([1, 2, 4, 8])
        share = 8 // width
        read = [order.at(np.arange(at, at + share))[1] for at in range(position, position + 8, share)]
        assert np.array_equal(np.concatenate(read), whole[position : position + 8])


def test_any_resume_at_any_width_reads_the_same_samples() -> None:
    """Asked for in prime-rl#3332, ModernBERT#246 and streaming#869."""
    resumes_exactly_once(40)


@pytest.mark.slow
def test_ten_thousand_resumes_read_the_same_samples() -> None:
    resumes_exactly_once(10_000)


def test_positions_of_1e12_samples_are_exact() -> None:
    per = 10**9
    counts = [[per * (n + 1)] for n in range(1000)]
    order = SectionedOrder(5, 1000, ends_of(counts), [1.0])
    places = [0, per - 1, per, 10**12 - 1, 10**12, 7 * 10**12 + 123_456_789_012]
    turns, ids = order.at(places)
    assert turns.tolist() == [0, 0, 0, 0, 1, 7]
    assert (ids // per).tolist() == [0, 0, 1, 999, 0, 123]


def test_a_source_without_a_sample_is_refused() -> None:
    order = SectionedOrder(1, 2, ends_of([[5, 0], [9, 0]]), [1.0, 1.0])
    order.at(3)
    with pytest.raises(InputError, match=r"data.sources.1: weight 1 of 0 samples gives none"):
        order.at(7)

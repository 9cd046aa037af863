from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.samples.mixture.interleave import MOST, Interleave

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


def bound(sources: int) -> Fraction:
    return (1 + sum(Fraction(1, n) for n in range(1, sources))) / 2


@settings(max_examples=150, deadline=None)
@given(WEIGHTS)
def test_the_closed_form_is_what_counting_one_by_one_gives(weights: list[int]) -> None:
    lanes = Interleave(weights)
    sources, before = lanes.at(np.arange(700))
    seen = [0] * len(weights)
    for place, (source, count) in enumerate(zip(sources.tolist(), before.tolist(), strict=True)):
        assert lanes.counts(place) == seen
        assert count == seen[source]
        seen[source] += 1


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(0, 2**61))
def test_every_window_of_positions_has_the_proportions_but_for_a_constant(
    weights: list[int], first: int
) -> None:
    lanes, total = Interleave(weights), sum(weights)
    most = bound(sum(w > 0 for w in weights))
    start = lanes.counts(first)
    for length in (1, 2, 7, 64, 1000, 10**12):
        counts = lanes.counts(first + length)
        for number, weight in enumerate(weights):
            assert abs(counts[number] - Fraction(weight * (first + length), total)) <= most
            assert abs(counts[number] - start[number] - Fraction(weight * length, total)) <= 2 * most


def test_a_period_has_exactly_the_weights() -> None:
    assert Interleave([5, 3, 2]).counts(10) == [5, 3, 2]
    assert np.bincount(Interleave([5, 3, 2]).at(np.arange(10**6, 10**6 + 10))[0]).tolist() == [5, 3, 2]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, MOST // 9), min_size=1, max_size=9).filter(any),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
)
def test_large_positions_do_not_overflow(weights: list[int], places: list[int]) -> None:
    lanes = Interleave(weights)
    sources, before = lanes.at(np.array(places))
    for place, source, count in zip(places, sources.tolist(), before.tolist(), strict=True):
        now, then = lanes.counts(place), lanes.counts(place + 1)
        assert now[source] == count
        assert [b - a for a, b in zip(now, then, strict=True)] == [int(n == source) for n in range(len(now))]


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
def test_where_a_source_reaches_a_count(weights: list[int], count: int) -> None:
    lanes = Interleave(weights)
    for source, weight in enumerate(weights):
        if weight:
            places = lanes.reach(source, count)
            assert lanes.counts(places)[source] == count
            assert places == 0 or lanes.counts(places - 1)[source] == count - 1


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [MOST, 1]])
def test_weights_that_are_none(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="are not from 0 on"):
        Interleave(weights)


def test_the_order_of_sources_is_fixed_forever() -> None:
    # A change here changes the meaning of every committed position of a mixture.
    assert Interleave([3, 2, 5]).at(np.arange(12))[0].tolist() == [2, 0, 2, 1, 2, 0, 2, 1, 2, 0, 2, 0]

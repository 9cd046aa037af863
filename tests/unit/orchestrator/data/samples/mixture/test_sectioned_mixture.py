from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.mixture.sectioned_mixture import SectionedMixture

COUNTS = [[3, 10], [3, 40], [57, 41], [57, 41], [91, 90]]
"""Samples of each source up to the end of each section; one section has none."""
PHASES = [(0, [1, 3]), (50, [5, 2])]
LIMITS = [Fraction(1), Fraction(3, 2)]


def ends_of(asked: list[int], upto: int | None = None) -> Callable[[int], Sequence[int]]:
    """The ends of the sections, of which only those before `upto` are there; notes which are `asked` for."""

    def ends(section: int) -> Sequence[int]:
        assert upto is None or section < upto, "not prepared yet"
        asked.append(section)
        return COUNTS[section]

    return ends


def made(most: Sequence[Fraction | None] = (), upto: int | None = None) -> SectionedMixture:
    return SectionedMixture(7, len(COUNTS), ends_of([], upto), PHASES, most)


@pytest.mark.parametrize("most", [(), LIMITS, (None, Fraction(1))])
def test_sources_come_as_in_a_mixture_that_is_shuffled_whole(most: Sequence[Fraction | None]) -> None:
    order, whole = made(most), MixedOrder(7, COUNTS[-1], PHASES, most)
    assert (order.size, order.samples, order.changes()) == (whole.size, whole.samples, whole.changes())
    end = min(order.size or 700, 700)
    turns, ids = order.at(np.arange(end))
    their_turns, their_ids = whole.at(np.arange(end))
    assert np.array_equal(ids % 2, their_ids >= 91)
    assert np.array_equal(turns, their_turns)
    assert [order.drawn(at) for at in (0, 1, 99, end)] == [whole.drawn(at) for at in (0, 1, 99, end)]


def test_how_far_it_reaches_is_known_without_waiting_for_later_sections() -> None:
    assert made(LIMITS, upto=1).has(4)
    order = made(LIMITS)
    assert order.size == 91 + 90 * 3 // 2
    assert [made(LIMITS).has(order.size + more) for more in (-1, 0, 1)] == [True, True, False]
    assert made().has(10**6)


def test_a_pass_has_every_sample_once_section_after_section() -> None:
    turns, ids = made().at(np.arange(600))
    seen = set()
    for source in (0, 1):
        bounds = [0, *(count[source] for count in COUNTS)]
        for turn in range(int(turns[ids % 2 == source].max())):
            index = ids[(ids % 2 == source) & (turns == turn)] // 2
            assert sorted(index) == list(range(bounds[-1]))
            for first, end in pairwise(bounds):
                assert sorted(index[first:end]) == list(range(first, end))
            seen.add(tuple(index))
            assert list(index) != sorted(index)
    assert len(seen) == 6


@pytest.mark.parametrize("most", [(), LIMITS])
@pytest.mark.parametrize("upto", range(1, len(COUNTS) + 1))
def test_what_is_prepared_so_far_has_the_order_that_all_of_it_has(
    upto: int, most: Sequence[Fraction | None]
) -> None:
    whole, growing = made(most).at(np.arange(200)), made(most, upto)
    places = MixedOrder(7, [1000, 1000], PHASES)
    there = next(p for p in range(200) if any(np.greater_equal(places.drawn(p + 1), COUNTS[upto - 1])))
    for position in range(there if upto < len(COUNTS) else 200):
        turn, sample = growing.at(position)
        assert (int(turn), int(sample)) == (whole[0][position], whole[1][position])
    if upto < len(COUNTS):
        with pytest.raises(AssertionError, match="not prepared yet"):
            growing.at(there)


def test_sections_are_asked_for_when_they_are_due() -> None:
    asked: list[int] = []
    order = SectionedMixture(7, len(COUNTS), ends_of(asked), [(0, [1, 3])])
    order.at([0, 3])
    assert asked == [0]
    order.at(np.arange(20))
    assert asked == [0, 1, 2]
    order.at(2**40)
    assert asked == [0, 1, 2, 3, 4]


def any_mixture(draw: np.random.Generator) -> Callable[[], SectionedMixture]:
    """Makes the same mixture again and again: of up to four sources, whose proportions change up to four times."""
    sources, count = int(draw.integers(1, 5)), int(draw.integers(1, 7))
    counts = np.cumsum(draw.integers(0, 30, (count, sources)), 0)
    counts[-1] += 1
    starts = [0, *np.unique(draw.integers(1, 300, int(draw.integers(0, 5)))).tolist()]
    phases = [(start, draw.integers(1, 9, sources).tolist()) for start in starts]
    most = [None, *(Fraction(int(draw.integers(2, 9)), 2) for _ in range(sources - 1))]
    return lambda: SectionedMixture(3, count, lambda section: counts[section].tolist(), phases, most)


@pytest.mark.parametrize("cases", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_resume_at_any_width_reads_the_same_samples(cases: int) -> None:
    draw = np.random.default_rng(5)
    for number in range(cases):
        if number % 20 == 0:
            again = any_mixture(draw)
            quiet = again().at(np.arange(420))
        order, position, width = again(), int(draw.integers(412)), int(draw.choice([1, 2, 4, 8]))
        share = 8 // width
        read = [order.at(np.arange(at, at + share)) for at in range(position, position + 8, share)]
        for which in (0, 1):
            found = np.concatenate([part[which] for part in read])
            assert np.array_equal(found, quiet[which][position : position + 8])


def test_a_mixture_of_1e12_samples_that_changes_draws_what_one_that_is_shuffled_whole_does() -> None:
    per, sections, changes = 10**9 + 7, 1000, [(0, [6, 3]), (4 * 10**12, [1, 2**20]), (5 * 10**12, [1, 1])]
    samples = [sections * per, 3 * 10**11 + sections]
    ends = lambda n: [per * (n + 1), 3 * 10**8 * (n + 1) + n + 1]  # noqa: E731
    order, whole = SectionedMixture(3, sections, ends, changes), MixedOrder(3, samples, changes)
    positions = np.array([0, 1, 10**12, *(at + by for at, _ in changes[1:] for by in (-1, 0, 1)), 2**60])
    turns, ids = order.at(positions)
    their_turns, their_ids = whole.at(positions)
    source, index = ids % 2, ids // 2
    assert np.array_equal(source, their_ids >= samples[0])
    assert np.array_equal(turns, their_turns)
    for at, which, turn, one in zip(positions.tolist(), source, turns, index, strict=True):
        drawn = order.drawn(at)
        assert drawn == whole.drawn(at)
        assert sum(drawn) == at
        section = (drawn[which] - int(turn) * samples[which]) // (samples[which] // sections)
        assert 0 <= section < sections
        assert section == int(one) // (samples[which] // sections)


def test_positions_of_1e12_samples_are_exact() -> None:
    per = 10**9
    order = SectionedMixture(5, 1000, lambda section: [per * (section + 1), 7], [(0, [3, 1])])
    turns, ids = order.at([0, 4 * per, 4 * 10**12 - 4, 2**60])
    assert (ids // 2 // per)[ids % 2 == 0].tolist()[:1] == [0]
    source, index = ids % 2, ids // 2
    drawn = order.drawn(2**60)
    assert drawn == [3 * 2**58, 2**58]
    assert int(turns[3]) == drawn[source[3]] // [10**12, 7][source[3]]
    assert (turns[source == 0] == [n // 10**12 for n in (0, 3 * per, 3 * 10**12 - 3, 3 * 2**58)]).all()
    assert (index[source == 0] < 10**12).all()


def test_the_end_of_all_passes_and_a_source_without_samples_are_told() -> None:
    order = made(LIMITS)
    assert order.size == 91 + 135
    with pytest.raises(InputError, match="all sources reach max_passes after 226 samples"):
        order.at(226)
    with pytest.raises(InputError, match=r"data.sources.1: has no sample"):
        SectionedMixture(1, 2, lambda section: [9, 0], PHASES).at(40)

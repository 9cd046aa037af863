from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.samples.batches import slices
from orchestrator.data.samples.mixture.interleave import MOST, Interleave
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.order import permute

MIXTURES = st.integers(1, 4).flatmap(
    lambda sources: st.tuples(
        st.lists(st.integers(1, 30), min_size=sources, max_size=sources),
        st.lists(st.integers(1, 50), min_size=0, max_size=3, unique=True).map(
            lambda ends: [0, *sorted(ends)]
        ),
        st.lists(
            st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any),
            min_size=4,
            max_size=4,
        ),
        st.lists(
            st.one_of(st.none(), st.sampled_from([1, Fraction(3, 2), 4])), min_size=sources, max_size=sources
        ),
        st.integers(0, 2**70),
    )
)


@settings(max_examples=40, deadline=None)
@given(MIXTURES)
def test_the_order_is_that_of_a_small_model_that_counts(mixture: tuple) -> None:  # type: ignore[type-arg]
    """Sources are counted one position after the other; what may come no more is left out of the proportions."""
    samples, starts, weights, most, seed = mixture
    order = MixedOrder(seed, samples, list(zip(starts, weights[: len(starts)], strict=True)), most)
    end = 150 if order.size is None else min(150, order.size)
    turns, ids = order.at(np.arange(end))
    limits = [None if m is None else int(m * n) for m, n in zip(most, samples, strict=True)]
    offsets, seen = [sum(samples[:n]) for n in range(len(samples))], [0] * len(samples)
    lanes, now, drawn = [], None, []
    for position in range(end):
        phase = sum(start <= position for start in starts) - 1
        left = [
            weight if limit is None or count < limit else 0
            for weight, count, limit in zip(weights[phase], seen, limits, strict=True)
        ]
        if (phase, left) != now:
            lanes, now = Interleave(left).at(np.arange(end))[0].tolist(), (phase, left)
            begun = position
        source = lanes[position - begun]
        assert order.drawn(position) == seen
        drawn.append((source, *divmod(seen[source], samples[source])))
        seen[source] += 1
    for source, size in enumerate(samples):
        mine = [n for n, (of, _, _) in enumerate(drawn) if of == source]
        turn, index = (np.array([drawn[n][k] for n in mine], dtype=np.int64) for k in (1, 2))
        assert turns[mine].tolist() == turn.tolist()
        shuffled = permute(index, turn, size, order._seeds[source])
        assert (ids[mine] - offsets[source]).tolist() == shuffled.tolist()
    if order.size is not None:
        last = weights[sum(start <= order.size for start in starts) - 1]
        there = zip(order.drawn(order.size), limits, last, strict=True)
        assert all(count == limit for count, limit, weight in there if weight)
        with pytest.raises(InputError, match="all sources reach max_passes"):
            order.at(order.size)


@settings(max_examples=50, deadline=None)
@given(MIXTURES)
def test_every_pass_has_every_sample_once(mixture: tuple) -> None:  # type: ignore[type-arg]
    samples, starts, weights, most, seed = mixture
    order = MixedOrder(seed, samples, list(zip(starts, weights[: len(starts)], strict=True)), most)
    end = 300 if order.size is None else min(300, order.size)
    turns, ids = order.at(np.arange(end))
    drawn = Counter(zip(ids.tolist(), turns.tolist(), strict=True))
    assert set(drawn.values()) <= {1}
    offset = 0
    for size, count in zip(samples, order.drawn(end), strict=True):
        for turn in range(count // size):
            assert all((sample, turn) in drawn for sample in range(offset, offset + size))
        offset += size


def test_positions_may_be_asked_in_any_shape_and_alone() -> None:
    order = MixedOrder(5, [7, 3], [(0, [1, 2]), (20, [5, 1])])
    turns, ids = order.at(np.arange(60).reshape(3, 20))
    assert turns.shape == ids.shape == (3, 20)
    alone = [tuple(int(x) for x in order.at(p)) for p in range(60)]
    assert alone == list(zip(turns.ravel().tolist(), ids.ravel().tolist(), strict=True))


def resumes_exactly_once(cases: int, seed: int) -> None:
    """Runs that stop at random steps and go on at random widths read what a quiet one reads, every position once."""
    random = np.random.default_rng(seed)
    for _ in range(cases):
        count = int(random.integers(1, 4))
        samples = random.integers(1, 50, count).tolist()
        phases = [(0, random.integers(1, 9, count).tolist()), (17, random.integers(1, 9, count).tolist())]
        order = MixedOrder(int(random.integers(2**60)), samples, phases)
        batch, steps = 12, 8
        quiet, found = order.at(np.arange(batch * steps)), []
        step = 0
        while step < steps:
            width = int(random.choice([1, 2, 3, 4, 6, 12]))
            micro = int(random.choice([m for m in (1, 2, 3, 4, 6, 12) if 12 // width % m == 0]))
            until = int(random.integers(step + 1, steps + 1))
            again = MixedOrder(order.seed, samples, phases)
            parts = [
                np.arange(first, first + size)
                for at in range(step, until)
                for rank in range(width)
                for first, size in slices(at * batch, batch, rank, width, micro)
            ]
            found.append(again.at(np.concatenate(parts)))
            step = until
        for number in (0, 1):
            assert np.array_equal(np.concatenate([part[number] for part in found]), quiet[number])


def test_a_run_that_is_cut_off_and_goes_on_at_other_widths_reads_the_same() -> None:
    resumes_exactly_once(300, 1)


@pytest.mark.slow
def test_ten_thousand_runs_that_are_cut_off_read_the_same() -> None:
    resumes_exactly_once(10_000, 2)


def test_a_trillion_samples_are_arithmetic() -> None:
    """Against Python's integers, at the ends of passes and of phases and between."""
    samples, weights, later = [10**12, 3 * 10**11 + 7, 41], [6, 3, 1], [1, 1, 2**20]
    turn_over = 4 * 10**12
    order = MixedOrder(3, samples, [(0, weights), (turn_over, later)])
    before = [turn_over * w // 10 for w in weights]
    positions = [0, 1, 10**12, 10**12 + 1, turn_over - 1, turn_over, turn_over + 12345, 2**60]
    turns, ids = order.at(np.array(positions))
    for position, turn, sample in zip(positions, turns.tolist(), ids.tolist(), strict=True):
        drawn, after = order.drawn(position), order.drawn(position + 1)
        source = next(n for n in range(3) if after[n] > drawn[n])
        assert sum(drawn) == position
        if position <= turn_over:
            assert all(abs(d - Fraction(position * w, 10)) < 2 for d, w in zip(drawn, weights, strict=True))
        else:
            assert all(d >= b for d, b in zip(drawn, before, strict=True))
        expected, index = divmod(drawn[source], samples[source])
        assert turn == expected
        offset = sum(samples[:source])
        assert offset <= sample < offset + samples[source]
        if samples[source] < 2**40:
            assert sample - offset == int(permute(index, expected, samples[source], order._seeds[source]))
    many = np.arange(turn_over - 100_000, turn_over + 100_000)
    drawn = list(zip(*(part.tolist() for part in order.at(many)), strict=True))
    assert len(set(drawn)) == len(drawn)
    assert order.drawn(10**12)[0] == 6 * 10**11
    assert sum(later) < MOST


def test_a_source_that_has_made_its_passes_gives_its_places_to_the_others() -> None:
    order = MixedOrder(1, [10, 1000, 1000], [(0, [2, 1, 1])], [Fraction(2), None, None])
    assert order.changes() == [(0, (2, 1, 1)), (39, (0, 1, 1))]
    assert order.drawn(39) == [20, 10, 9]
    assert order.drawn(239) == [20, 110, 109]
    assert order.size is None


def test_a_source_that_comes_in_no_phase_that_is_left_ends_the_order() -> None:
    order = MixedOrder(1, [10, 10], [(0, [1, 1]), (10, [1, 0])], [Fraction(1), None])
    assert order.size == 15
    assert order.drawn(15) == [10, 5]


def test_the_order_is_fixed_forever() -> None:
    # A change here changes the meaning of every committed position of a mixture.
    turns, ids = MixedOrder(17, [5, 7], [(0, [1, 2])]).at(np.arange(16))
    assert (turns.tolist(), ids.tolist()) == (
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1],
        [10, 3, 5, 7, 2, 11, 8, 1, 9, 6, 0, 10, 8, 4, 7, 5],
    )

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.samples.order import Order, permute


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3000), epoch=st.integers(0, 2**40), seed=st.integers(0, 2**70))
def test_every_index_of_an_epoch_comes_once(size: int, epoch: int, seed: int) -> None:
    drawn = permute(np.arange(size), epoch, size, seed)
    assert np.array_equal(np.sort(drawn), np.arange(size))


def test_a_large_epoch_needs_no_memory_and_hits_no_index_twice() -> None:
    size = 10**12
    positions = np.arange(size - 200_000, size)
    drawn = permute(positions, 3, size, seed=1)
    assert drawn.min() >= 0
    assert drawn.max() < size
    assert len(np.unique(drawn)) == len(positions)
    assert abs(drawn.mean() / size - 0.5) < 0.005


def test_epochs_and_seeds_have_their_own_order() -> None:
    drawn = [tuple(permute(np.arange(100), epoch, 100, seed)) for epoch in range(20) for seed in range(20)]
    assert len(set(drawn)) == 400


def test_the_order_is_fixed_forever() -> None:
    # A change here changes the meaning of every committed position.
    assert permute(np.arange(10), 0, 10, 17).tolist() == [3, 7, 4, 8, 0, 2, 5, 1, 6, 9]
    assert permute(np.arange(3), 5, 10**12, 2**65 + 3).tolist() == [630608241897, 6155192965, 591313130292]
    assert Order(17, [5, 7], [1.0, 2.5]).at(np.arange(6))[1].tolist() == [8, 5, 9, 1, 10, 6]


def test_the_first_index_goes_everywhere_alike() -> None:
    size, epochs = 16, 16_000
    counts = np.bincount(permute(np.zeros(epochs, int), np.arange(epochs), size, 5), minlength=size)
    chi_squared = float(((counts - epochs / size) ** 2 / (epochs / size)).sum())
    assert chi_squared < 37.7  # 0.1 % of fair draws exceed it, with 15 degrees of freedom


def test_neighbours_are_not_sent_to_neighbours() -> None:
    size = 50_000
    drawn = permute(np.arange(size), 0, size, 9)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(drawn)) == 1).mean() < 0.001


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0.25, 0.29, 0.5, 1.0, 1.5, 2.0, 3.7])),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_an_epoch_takes_its_weight_of_every_source(sources: list[tuple[int, float]], seed: int) -> None:
    samples, weights = [n for n, _ in sources], [w for _, w in sources]
    taken = [int(Fraction(str(w)) * n) for n, w in sources]
    if not all(taken):
        with pytest.raises(InputError, match="gives none"):
            Order(seed, samples, weights)
        return
    order = Order(seed, samples, weights)
    assert order.epoch_size == sum(taken)
    turns, ids = order.at(np.arange(order.epoch_size) + 2 * order.epoch_size)
    assert len(set(zip(turns.tolist(), ids.tolist(), strict=True))) == order.epoch_size
    ends = np.cumsum(samples)
    assert np.bincount(np.searchsorted(ends, ids, side="right"), minlength=len(samples)).tolist() == taken
    for source, (count, end) in enumerate(zip(taken, ends, strict=True)):
        of_source = ids[(ids >= end - samples[source]) & (ids < end)]
        repeats = np.unique(of_source, return_counts=True)[1]
        assert not count or repeats.max() - repeats.min(initial=count) <= 1


def test_a_fractional_weight_sees_all_of_the_source_in_turn() -> None:
    order = Order(3, [100, 40], [0.25, 1.0])
    _, ids = order.at(np.arange(4 * order.epoch_size))
    first, second = ids[ids < 100], ids[ids >= 100]
    assert np.array_equal(np.sort(first), np.arange(100))
    assert np.array_equal(np.sort(second), np.repeat(np.arange(100, 140), 4))


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0.3, 1.0, 1.7, 2.0, 3.5])), min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**32),
)
def test_no_sample_has_the_same_turn_twice(sources: list[tuple[int, float]], seed: int) -> None:
    samples, weights = [n for n, _ in sources], [w for _, w in sources]
    assume(all(int(Fraction(str(w)) * n) for n, w in sources))
    order = Order(seed, samples, weights)
    turns, ids = order.at(np.arange(7 * order.epoch_size))
    drawn = list(zip(ids.tolist(), turns.tolist(), strict=True))
    assert len(set(drawn)) == len(drawn)
    for sample in set(ids.tolist()):
        assert sorted(turns[ids == sample].tolist()) == list(range((ids == sample).sum()))


def test_the_version_before_drew_by_the_epoch_and_left_out_what_was_too_little() -> None:
    order = Order(0, [10, 3], [2.0, 0.3], by_pass=False)
    turns, ids = order.at(np.arange(40))
    assert turns.tolist() == [0] * 20 + [1] * 20
    assert ids.max() == 9
    with pytest.raises(InputError, match=r"data\.sources\.1\.weight: weight 0\.3 of 3 samples gives none"):
        Order(0, [10, 3], [2.0, 0.3])


def test_a_weight_is_the_decimal_that_was_written() -> None:
    assert Order(0, [100], [0.29]).epoch_size == 29


def test_positions_may_be_asked_in_any_shape_and_alone() -> None:
    order = Order(1, [50], [1.0])
    epochs, ids = order.at(np.arange(120).reshape(3, 40))
    assert epochs.shape == ids.shape == (3, 40)
    alone = [tuple(int(x) for x in order.at(p)) for p in range(120)]
    assert alone == list(zip(epochs.ravel().tolist(), ids.ravel().tolist(), strict=True))


def test_many_epochs_of_a_large_source_do_not_overflow() -> None:
    samples = 2**40 + 7
    order = Order(0, [samples], [0.5])
    epoch = 2**21
    turn, sample = order.at(epoch * order.epoch_size)
    index = permute(0, epoch, order.epoch_size, 0)
    assert int(turn) == (int(index) + epoch * order.epoch_size) // samples
    assert int(sample) == (int(index) + epoch * order.epoch_size) % samples

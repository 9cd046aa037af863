from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.samples.packing.index import cut, pack


def slow_pack(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, piece by piece, looking at all samples."""
    samples: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [sample for sample in samples if capacity - sum(sample) >= size]
        if fitting:
            min(fitting, key=lambda sample: capacity - sum(sample)).append(size)
        else:
            samples.append([size])
    return samples


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=60))
    )
)
def test_it_is_best_fit_decreasing(drawn: tuple[int, list[int]]) -> None:
    capacity, sizes = drawn
    found = pack(np.array(sizes, dtype=np.int64), capacity)
    samples: dict[int, list[int]] = {}
    for size, sample in zip(sizes, found.tolist(), strict=True):
        samples.setdefault(sample, []).append(size)
    assert all(sum(sample) <= capacity for sample in samples.values())
    # which of the samples with equal room is taken does not matter for the room that is left
    room = Counter(capacity - sum(sample) for sample in samples.values())
    assert room == Counter(capacity - sum(sample) for sample in slow_pack(sizes, capacity))
    assert sorted(samples) == list(range(len(samples)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(2, 12), st.integers(0, 1))
def test_every_token_is_in_one_piece_but_for_the_overlap(
    lengths: list[int], window: int, overlap: int
) -> None:
    stops = np.cumsum(lengths)
    starts = stops - lengths
    stride = window - overlap
    begins, ends = cut(starts, stops, window, stride)
    assert all(0 < end - begin <= window for begin, end in zip(begins, ends, strict=True))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        mine = [(b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True) if start <= b < stop]
        if stop - start <= window:
            assert mine == ([(start, stop)] if stop - start > overlap else [])
            continue
        # a token is predicted in the piece that has it and the one before
        predicted = [token for b, e in mine for token in range(b + overlap, e)]
        assert predicted == list(range(start + overlap, stop))
        assert all(e - b == window for b, e in mine[:-1])


def test_a_million_pieces_take_no_time_to_speak_of() -> None:
    """The time is not asserted; piece by piece this would take hours."""
    sizes = np.random.default_rng(0).integers(1, 2050, 200_000)
    found = pack(sizes, 2049)
    filled = np.bincount(found, weights=sizes)
    assert filled.max() <= 2049
    assert filled.sum() / (2049 * len(filled)) > 0.99

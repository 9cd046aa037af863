from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workloads.objectives import spans

masks = st.lists(st.booleans(), max_size=40).map(lambda v: np.array(v, dtype=bool))


@given(masks)
def test_runs_cover_what_is_true_and_nothing_else(mask):
    starts, stops = spans.runs(mask)
    covered = np.zeros(len(mask), dtype=bool)
    for start, stop in zip(starts, stops, strict=True):
        covered[start:stop] = True
    assert np.array_equal(covered, mask)
    assert np.all(starts[1:] > stops[:-1])
    assert np.array_equal(np.flatnonzero(spans.run_starts(mask)), starts)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_pieces_cut_runs_where_told(pairs):
    inside, begins = (np.array(v) for v in zip(*pairs, strict=True))
    starts, stops = spans.pieces(inside, begins)
    joined = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)] or [[]])
    assert np.array_equal(joined, np.flatnonzero(inside))
    assert np.array_equal(starts, np.flatnonzero((inside & begins) | spans.run_starts(inside)))


def test_sentences_end_with_their_closing_token_and_at_documents():
    closing = np.arange(10) == 9
    starts, stops = spans.sentences(np.array([1, 9, 2, 0, 0, 3, 9, 9, 4]), 0, closing)
    assert list(zip(starts, stops, strict=True)) == [(0, 2), (2, 3), (5, 7), (7, 8), (8, 9)]


def test_words_never_hold_a_special_token():
    begin = np.arange(10) >= 8
    starts, stops = spans.words(np.array([1, 8, 2, 0, 3, 4, 9]), np.array([1, 1, 1, 0, 1, 1, 1], bool), begin)
    assert list(zip(starts, stops, strict=True)) == [(0, 1), (1, 3), (4, 6), (6, 7)]


def test_the_longest_document():
    assert spans.longest_document(np.array([1, 0, 2, 3, 0, 4]), 0).tolist() == [2, 3]
    assert spans.longest_document(np.array([0, 0]), 0).tolist() == []


@given(st.integers(1, 60), st.integers(0, 2**32), st.data())
def test_compositions_add_up(total, seed, data):
    parts = data.draw(st.integers(1, total))
    lengths = spans.composition(total, parts, np.random.default_rng(seed))
    assert len(lengths) == parts
    assert lengths.sum() == total
    assert lengths.min() >= 1


def test_compositions_are_equally_likely():
    rng = np.random.default_rng(0)
    counts = np.zeros(4)
    for _ in range(4000):
        counts[spans.composition(5, 2, rng)[0] - 1] += 1
    assert np.all(np.abs(counts / 4000 - 0.25) < 0.03)


@given(st.integers(0, 30), st.lists(st.integers(0, 5), max_size=20))
def test_lengths_meet_the_budget(budget, drawn):
    lengths = spans.lengths_until(budget, np.array(drawn, dtype=np.int64))
    assert lengths.sum() == min(budget, sum(drawn))
    assert np.array_equal(lengths[:-1], drawn[: max(len(lengths) - 1, 0)])


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(0, 60), st.integers(0, 2), st.integers(0, 2**32))
def test_scattered_spans_keep_order_lengths_and_gaps(lengths, size, gap, seed):
    mask = spans.scatter(np.array(lengths, dtype=np.int64), size, np.random.default_rng(seed), gap)
    fit = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) + gap * i <= size]
    assert mask.sum() == sum(fit)
    if gap:
        starts, stops = spans.runs(mask)
        assert (stops - starts).tolist() == fit
        assert np.all(starts[1:] - stops[:-1] >= gap)


def test_scattering_is_uniform_over_placements():
    rng = np.random.default_rng(0)
    seen: dict[tuple[bool, ...], int] = {}
    for _ in range(6000):
        key = tuple(spans.scatter(np.array([2, 1]), 6, rng).tolist())
        seen[key] = seen.get(key, 0) + 1
    assert len(seen) == 6
    assert all(abs(n / 6000 - 1 / 6) < 0.02 for n in seen.values())

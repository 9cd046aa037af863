from __future__ import annotations

import numpy as np
import pytest

from workloads.objectives import masking

IDS = np.arange(100, 200)


def test_four_fifths_masked_a_tenth_random_a_tenth_kept():
    tokens, rng = np.full(40_000, 150), np.random.default_rng(0)
    out = masking.corrupt(tokens, np.ones(40_000, dtype=bool), 5, IDS, rng)
    assert (out == 5).mean() == pytest.approx(0.8, abs=0.01)
    assert ((out != 5) & (out != 150)).mean() == pytest.approx(0.099, abs=0.006)
    noise = np.bincount(out[(out != 5) & (out != 150)], minlength=200)[100:]
    assert noise[50] == 0
    assert np.delete(noise, 50).min() > 15
    assert noise.max() < 80


def test_nothing_but_the_chosen_is_touched():
    tokens, rng = np.arange(100, 200), np.random.default_rng(0)
    chosen = np.arange(100) % 2 == 0
    out = masking.corrupt(tokens, chosen, 5, IDS, rng)
    assert np.array_equal(out[~chosen], tokens[~chosen])
    assert masking.labels_at(tokens, chosen).tolist() == [t if t % 2 == 0 else -100 for t in range(100, 200)]


def test_a_unit_shares_its_fate():
    rng, first = np.random.default_rng(0), np.arange(3000) // 3 * 3
    tokens = np.full(3000, 150)
    out = masking.corrupt(tokens, np.ones(3000, dtype=bool), 5, np.array([7]), rng, first).reshape(-1, 3)
    assert (out == out[:, :1]).all()
    assert (out[:, 0] == 5).mean() == pytest.approx(0.8, abs=0.04)


def test_the_rate_is_exact_and_at_least_one_token():
    text = np.array([True] * 100 + [False] * 50)
    for seed in range(20):
        chosen = masking.choose_tokens(text, 0.15, np.random.default_rng(seed))
        assert chosen.sum() == 15
        assert not chosen[100:].any()
    assert masking.choose_tokens(text[98:], 0.15, np.random.default_rng(0)).sum() == 1
    assert masking.choose_tokens(text[100:], 0.15, np.random.default_rng(0)).sum() == 0


def test_a_span_of_words_ends_at_a_special_token():
    text = np.array([True, True, False, True, True])
    words = np.array([0, 1, 3, 4]), np.array([1, 2, 4, 5])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        _, first = masking.choose_word_spans(words, text, 0.9, np.full(8, 4), rng)
        assert (first[3:] >= 3).all()


def test_a_unit_beyond_the_rate_is_passed_over():
    text = np.ones(20, dtype=bool)
    units = np.array([0, 10, 12]), np.array([10, 12, 20])
    for seed in range(10):
        chosen, _ = masking.choose_units(units, text, 0.15, np.random.default_rng(seed))
        assert np.flatnonzero(chosen).tolist() == [10, 11]

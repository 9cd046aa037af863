from __future__ import annotations

import numpy as np
import pytest

from workloads.objectives.spans import runs, words

FAMILY = ["masked_lm", "whole_word_masking", "span_masking", "entity_masking", "replaced_token_detection"]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_the_rate(name, rate, samples):
    _, _, batch = samples(name, 100, rate=rate)
    assert (batch["labels"] != -100).sum() / (100 * 126) == pytest.approx(rate, abs=0.006)


@pytest.mark.parametrize("name", [n for n in FAMILY if n != "replaced_token_detection"])
def test_eighty_ten_ten(name, samples):
    _, _, batch = samples(name, 300)
    chosen = batch["labels"] != -100
    tokens, labels = batch["tokens"][chosen], batch["labels"][chosen]
    tolerance = 0.03 if name == "span_masking" else 0.015
    assert (tokens == 5).mean() == pytest.approx(0.8, abs=tolerance)
    assert (tokens == labels).mean() == pytest.approx(0.1, abs=tolerance)


@pytest.mark.parametrize("name", FAMILY)
def test_special_tokens_in_the_text_are_left_alone(name, make, draw, vocabulary):
    objective = make(name)
    rng = np.random.default_rng(0)
    windows = [
        np.where(rng.random(62) < 0.3, rng.choice(sorted(vocabulary.special)), draw(i, 62)) for i in range(50)
    ]
    batch = objective.collate(lambda i: windows[i], range(50), 0)
    special = ~objective.is_text(np.stack(windows))
    assert special.any()
    assert (batch["labels"].numpy()[:, 1:-1][special] == -100).all()
    assert np.array_equal(batch["tokens"].numpy()[:, 1:-1][special], np.stack(windows)[special])
    assert (batch["labels"][:, [0, -1]] == -100).all()


def test_whole_words_are_hidden_or_left_whole(samples, vocabulary):
    objective, windows, batch = samples("whole_word_masking", 50, ends=0.05)
    sizes = set()
    for window, labels in zip(windows, batch["labels"][:, 1:-1], strict=True):
        starts, stops = words(window, objective.is_text(window), vocabulary.word_start)
        for start, stop in zip(starts, stops, strict=True):
            hidden = labels[start:stop] != -100
            assert hidden.all() or not hidden.any()
            sizes.add(int(hidden.sum()))
    assert sizes >= {0, 1, 2, 3}


def test_tokens_of_a_whole_word_have_fates_of_their_own(samples, vocabulary):
    _, windows, batch = samples("whole_word_masking", 100)
    inner = (batch["labels"][:, 1:-2] != -100) & ~vocabulary.word_start[windows[:, 1:]].astype(bool)[:, :125]
    assert inner.any()
    pair = (batch["tokens"][:, 1:-2] == 5) != (batch["tokens"][:, 2:-1] == 5)
    both = (batch["labels"][:, 1:-2] != -100) & (batch["labels"][:, 2:-1] != -100) & inner
    assert 0.2 < pair[both].mean() < 0.45


def test_span_lengths_follow_the_clipped_geometric(samples, vocabulary):
    # A small rate in a long window: spans seldom touch, and only the last is cut to the rate.
    objective, windows, batch = samples("span_masking", 60, 1026, rate=0.1)
    lengths = []
    for window, labels in zip(windows, batch["labels"][:, 1:-1], strict=True):
        starts, stops = words(window, objective.is_text(window), vocabulary.word_start)
        hidden = labels[starts] != -100
        assert np.array_equal(np.repeat(hidden, stops - starts), labels != -100)
        begins, ends = runs(hidden)
        lengths += (ends - begins).tolist()
    p = 0.2 * 0.8 ** np.arange(10)
    assert np.mean(lengths) == pytest.approx((p / p.sum()) @ np.arange(1, 11), abs=0.35)
    share = np.bincount(lengths, minlength=11)[1:5] / len(lengths)
    assert share == pytest.approx((p / p.sum())[:4], abs=0.05)


def test_a_span_shares_its_fate(samples):
    _, _, batch = samples("span_masking", 100, 258, rate=0.05)
    shares = []
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        for start, stop in zip(*runs(labels != -100), strict=True):
            masked = tokens[start:stop] == 5
            shares.append(masked.all() or not masked.any())
    # Runs that differ inside are two spans that touch.
    assert np.mean(shares) > 0.97


def test_spans_never_cross_a_document(samples):
    _, windows, batch = samples("span_masking", 50, ends=0.2)
    assert ((batch["labels"][:, 1:-1] == -100) | (windows != 0)).all()


def test_entities_are_hidden_or_left_whole_and_the_longest_counts(make, draw):
    objective = make("entity_masking", 66, rate=0.3)
    window = draw(0, 64) % 50 + 200
    window[10:13], window[20:22], window[30:34] = [120, 121, 122], [120, 121], [130, 131, 132, 133]
    window[40:43] = [130, 131, 132]
    batch = objective.collate(lambda i: window, range(200), 0)
    hidden = (batch["labels"] != -100).numpy()[:, 1:-1]
    masked = (batch["tokens"] == 5).numpy()[:, 1:-1]
    for start, stop in [(10, 13), (20, 22), (30, 34)]:
        assert set(hidden[:, start:stop].sum(axis=1)) == {0, stop - start}
        assert set(masked[:, start:stop].sum(axis=1)) == {0, stop - start}
    assert set(hidden[:, 40:43].sum(axis=1)) >= {0, 1, 2}
    assert hidden[:, 10].mean() == pytest.approx(0.3, abs=0.1)


def test_detection_masks_all_and_seeds_each_sample(samples):
    _, windows, batch = samples("replaced_token_detection", 50)
    assert (batch["tokens"][batch["labels"] != -100] == 5).all()
    assert np.array_equal(batch["targets"][:, 1:-1], windows)
    assert len(set(batch["sample_seed"])) == 50
    assert batch["sample_seed"].min() >= 0


def test_seeds_of_detection_change_with_the_epoch(make, draw):
    objective = make("replaced_token_detection")
    seeds = [objective.collate(lambda i: draw(i, 62), [3], epoch)["sample_seed"].item() for epoch in range(5)]
    assert len(set(seeds)) == 5

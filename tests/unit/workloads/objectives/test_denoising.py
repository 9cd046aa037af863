from __future__ import annotations

from itertools import pairwise
from math import exp

import numpy as np
import pytest


def visible(row):
    """The encoder's text without its frame."""
    return row[row != 1][1:-1]


def test_a_third_less_is_infilled_by_spans_of_poisson_length(samples):
    _, windows, batch = samples("denoising", 100, 514)
    masks = (batch["tokens"] == 5).sum()
    shown = (batch["tokens"] >= 110).sum()
    hidden = windows.size - shown
    assert hidden / windows.size == pytest.approx(0.3, abs=0.003)
    # One mask a span, empty spans among them, so that tokens a mask are the Poisson mean.
    assert hidden / masks == pytest.approx(3.0, abs=0.1)


def test_empty_spans_insert_masks(samples):
    _, windows, batch = samples("denoising", 60, 514, permute=False)
    empty = total = 0
    for window, row in zip(windows, batch["tokens"], strict=True):
        at = 0
        for token in visible(row):
            if token == 5:
                total += 1
                pending = at
                continue
            if at and pending == at:
                empty += token == window[at]
            while window[at] != token:
                at += 1
            at += 1
            pending = -1
    assert empty / total == pytest.approx(exp(-3), abs=0.025)


def test_text_is_in_order_without_permutation(samples):
    _, windows, batch = samples("denoising", 50, ends=0.05, permute=False)
    for window, row in zip(windows, batch["tokens"], strict=True):
        stream = iter(window)
        assert all(token in stream for token in visible(row)[visible(row) != 5])


def test_sentences_are_shuffled_within_their_document(make):
    window = np.full(62, 115)
    for place, sentence in enumerate(([110, 300], [111, 112, 301], [113, 302])):
        begin = sum((2, 3, 2)[:place])
        window[begin : begin + len(sentence)] = sentence
    window[7] = 0
    objective = make("denoising", 64, rate=0.001)
    batch = objective.collate(lambda i: window, range(600), 0)
    orders: dict[tuple[int, ...], int] = {}
    for row in batch["tokens"].numpy():
        text = visible(row)
        assert text[7] == 0
        assert (text[8:] == 115).all()
        key = tuple(text[:7].tolist())
        orders[key] = orders.get(key, 0) + 1
    assert len(orders) == 6
    assert all({(110, 300), (113, 302)} <= set(pairwise(o)) for o in orders)
    assert all(abs(n / 600 - 1 / 6) < 0.06 for n in orders.values())


def test_labels_are_the_original_and_the_decoder_starts_from_eos(samples):
    objective, windows, batch = samples("denoising", 5, ends=0.1)
    assert np.array_equal(batch["labels"][:, :126], windows)
    assert (batch["labels"][:, 126] == 0).all()
    assert (batch["labels"][:, 127] == -100).all()
    assert objective.decoder_start == 0
    assert (batch["decoder_tokens"][:, 0] == 0).all()
    assert np.array_equal(batch["decoder_tokens"][:, 1:127], windows)

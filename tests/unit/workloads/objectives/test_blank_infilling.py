from __future__ import annotations

from math import exp

import numpy as np
import pytest


def test_the_rate_and_the_lengths_of_spans(samples):
    _, windows, batch = samples("blank_infilling", 100, 512)
    spans = (batch["labels"] == 11).sum()
    hidden = (batch["labels"] != -100).sum() - spans
    assert hidden / windows.size == pytest.approx(0.15, abs=0.003)
    # The mean of Poisson(3) without zero, the last span of a sample cut to the rate.
    assert hidden / spans == pytest.approx(3 / (1 - exp(-3)), abs=0.12)


def test_spans_come_in_random_order(samples):
    _, _, batch = samples("blank_infilling", 100, 64)
    rising = [
        np.all(np.diff(outer[tokens == 10]) > 0)
        for (outer, _), tokens in zip(batch["positions"], batch["tokens"], strict=True)
        if (tokens == 10).sum() == 3
    ]
    assert len(rising) > 20
    assert np.mean(rising) == pytest.approx(1 / 6, abs=0.12)


def test_the_layout_of_a_sample(make):
    window = np.arange(110, 110 + make("blank_infilling", 16).window(16))
    batch = make("blank_infilling", 16).collate(lambda i: window, [0], 0)
    tokens, labels = batch["tokens"][0].tolist(), batch["labels"][0].tolist()
    outer, inner = batch["positions"][0].tolist()
    part_a = tokens.index(10)
    span = [t for t in labels if t >= 110]
    assert tokens[0] == 3
    assert tokens[part_a:] == [10, *span] + [1] * (16 - part_a - 1 - len(span))
    assert labels[part_a : part_a + len(span) + 1] == [*span, 11]
    place = tokens.index(5)
    assert outer[: part_a + len(span) + 1] == [*range(part_a), *[place] * (len(span) + 1)]
    assert inner[: part_a + len(span) + 1] == [0] * part_a + list(range(1, len(span) + 2))
    used = part_a + 1 + len(span)
    expected = [[j < part_a or j <= i if max(i, j) < used else i == j for j in range(16)] for i in range(16)]
    assert batch["attention"][0].tolist() == expected


@pytest.mark.parametrize("length", [8, 16, 64, 512])
@pytest.mark.parametrize("mean", [1.0, 3.0, 8.0])
def test_the_longest_case_fits(length, mean, make, draw):
    objective = make("blank_infilling", length, mean_span=mean)
    size = objective.window(length)
    assert size >= length / 2
    for ends in (0.0, 0.3):
        batch = objective.collate(lambda i, ends=ends: draw(i, size, ends), range(50), 0)
        assert batch["tokens"].shape == (50, length)


def test_spans_never_cross_a_document(samples):
    _, windows, batch = samples("blank_infilling", 50, ends=0.2)
    assert not (batch["labels"] == 0).any()
    assert np.array_equal((batch["tokens"] == 0).sum(axis=1), (windows == 0).sum(axis=1))

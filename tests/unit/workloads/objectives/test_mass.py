from __future__ import annotations

import numpy as np
import pytest

from workloads.objectives.spans import documents, runs


def test_each_document_has_one_fragment_of_half_its_length(samples):
    _, windows, batch = samples("mass", 50, ends=0.05)
    for window, labels in zip(windows, batch["labels"], strict=True):
        for start, stop in zip(*documents(window, 0), strict=True):
            begins, ends = runs(labels[start:stop] != -100)
            assert len(begins) == 1
            assert ends[0] - begins[0] == max(1, round(0.5 * (stop - start)))
        assert (labels[window == 0] == -100).all()


def test_the_fragment_stands_anywhere(samples):
    _, _, batch = samples("mass", 400, 64)
    begins = (batch["labels"] != -100).argmax(axis=1)
    assert begins.min() == 0
    assert begins.max() == 32
    assert begins.mean() == pytest.approx(16, abs=1.5)


def test_the_encoder_sees_bert_noise_in_the_fragment(samples):
    _, _, batch = samples("mass", 100)
    chosen = batch["labels"] != -100
    assert chosen.mean() == 0.5
    assert (batch["tokens"][chosen] == 5).mean() == pytest.approx(0.8, abs=0.02)
    assert (batch["tokens"] == batch["labels"])[chosen].mean() == pytest.approx(0.1, abs=0.02)


def test_the_decoder_sees_nothing_of_what_the_encoder_sees(samples):
    objective, windows, batch = samples("mass", 20, 64)
    for window, row, labels in zip(windows, batch["decoder_tokens"], batch["labels"], strict=True):
        places = np.flatnonzero(labels != -100)
        expected = np.full(64, objective.decoder_start)
        expected[places[1:]] = window[places[:-1]]
        assert np.array_equal(row, expected)

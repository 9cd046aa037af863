from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workloads.objectives import build

# The tail of a pair, a pair, one with two separators, an empty document, the beginning of a pair.
WINDOW = np.array([110, 111, 0, 112, 113, 4, 114, 0, 115, 4, 116, 4, 0, 0, 117, 4])


def test_a_pair_is_a_document_with_one_separator(make):
    batch = make("translation_lm", 16).collate(lambda i: WINDOW, [0], 0)
    real = [False] * 3 + [True] * 5 + [False] * 6 + [True] * 2
    assert batch["padding"][0].tolist() == real
    assert batch["token_types"][0].tolist() == [0] * 6 + [1, 1] + [0] * 8
    assert batch["positions"][0, 3:8].tolist() == [0, 1, 2, 0, 1]
    pair = [0] * 3 + [1] * 5 + [0] * 6 + [2] * 2
    expected = [[i == j or (pair[i] == pair[j] > 0) for j in range(16)] for i in range(16)]
    assert batch["attention"][0].tolist() == expected


def test_where_one_token_separates_and_ends_every_second_one_ends(vocabulary):
    alike = replace(vocabulary, sep=0)
    objective = build("translation_lm", vocabulary=alike, sequence_length=16, seed=7)
    window = np.array(
        [110, 0, 111, 112, 0, 0, 113, 0, 114, 115, 0, 0]
    )  # a pair, one without a source, without a target
    batch = objective.collate(lambda i: window, [0], 0)
    assert batch["padding"][0].tolist() == [True] * 12 + [False] * 4
    assert batch["token_types"][0].tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1] + [0] * 4
    assert batch["positions"][0, :12].tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 0, 1, 2, 0]
    pair = np.array([1] * 5 + [2] * 3 + [3] * 4)
    assert np.array_equal(batch["attention"][0, :12, :12], pair[:, None] == pair[None, :])
    beginning = objective.collate(lambda i: np.arange(110, 126), [0], 0)
    assert not beginning["padding"].any()
    assert (beginning["labels"] == -100).all()


def test_both_sides_of_a_pair_are_masked_at_the_rate(make, draw):
    windows = np.stack([draw(i, 128) for i in range(200)])
    windows[:, 10::22], windows[:, 21::22] = 4, 0
    batch = make("translation_lm", 128).collate(lambda i: windows[i], range(200), 0)
    chosen, types = (batch["labels"] != -100).numpy(), batch["token_types"].numpy()
    text = windows >= 110
    # The last 18 tokens hold a separator too, so that all is paired.
    assert batch["padding"].all()
    for side in (0, 1):
        assert chosen[text & (types == side)].mean() == pytest.approx(0.15, abs=0.01)
    assert not chosen[~text].any()
    assert (batch["tokens"].numpy()[chosen] == 5).mean() == pytest.approx(0.8, abs=0.03)

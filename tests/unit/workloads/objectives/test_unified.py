from __future__ import annotations

import numpy as np
import pytest

from workloads.objectives.spans import runs
from workloads.objectives.unified import MODES, attention_of

TYPES = np.array([0, 0, 0, 1, 1, 0])
REAL = np.array([1, 1, 1, 1, 1, 0], dtype=bool)
EXPECTED = {
    "bidirectional": ["11111", "11111", "11111", "11111", "11111"],
    "seq2seq": ["11100", "11100", "11100", "11110", "11111"],
    "left_to_right": ["10000", "11000", "11100", "11110", "11111"],
    "right_to_left": ["11111", "01111", "00111", "00011", "00001"],
}


@pytest.mark.parametrize("mode", MODES)
def test_the_masks(mode):
    rows = [*(row + "0" for row in EXPECTED[mode]), "000001"]
    expected = [[c == "1" for c in row] for row in rows]
    assert attention_of(mode, TYPES, REAL).tolist() == expected


def test_the_shares_of_the_masks(samples):
    _, _, batch = samples("unified_lm", 900, 32)
    counts = dict.fromkeys(MODES, 0)
    for types, real, attention in zip(
        batch["token_types"], batch["padding"], batch["attention"], strict=True
    ):
        counts[next(m for m in MODES if np.array_equal(attention_of(m, types, real), attention))] += 1
    shares = [counts[mode] / 900 for mode in MODES]
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 6, 1 / 6], abs=0.05)


def test_the_rate_and_the_n_grams(samples):
    _, _, batch = samples("unified_lm", 100, 256, rate=0.05)
    hidden = batch["labels"] != -100
    assert hidden.sum() / (100 * 253) == pytest.approx(0.05, abs=0.004)
    lengths = np.concatenate([np.diff(runs(row), axis=0)[0] for row in hidden])
    shares = np.bincount(lengths, minlength=4)[1:4] / len(lengths)
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.06)

"""Values that a Gaussian process chooses."""

from __future__ import annotations

import math
import random
import statistics
import warnings

import numpy as np
import pytest
from ray.tune.schedulers.pb2 import PB2, _select_config

from orchestrator.tune.config import TuneSpec
from orchestrator.tune.pb2 import Gain, explored
from orchestrator.tune.space import draw

LR, ZERO = "train.optimizer.lr", "parallel.zero"
TUNE = TuneSpec(
    space={LR: {"loguniform": [1e-4, 1.0]}, ZERO: {"choice": [0, 1, 2]}},  # type: ignore[dict-item]
    trials=4,
    scheduler="pb2",
)


def gains(best: dict[int, float], count: int = 12) -> list[Gain]:
    """What was seen up to each step, where the best learning rate was the given one."""
    source = random.Random(1)
    found = []
    for step, rate in best.items():
        for _ in range(count):
            lr = draw(TUNE.space[LR], source)
            found.append(Gain(step, {LR: lr, ZERO: 0}, 1.0 - abs(math.log10(lr / rate))))
    return found


def chosen(seen: list[Gain], step: int) -> float:
    """Median of the learning rates chosen, in powers of ten."""
    rates = [explored(TUNE, {LR: 0.5, ZERO: 1}, seen, step, random.Random(n))[LR] for n in range(5)]
    return statistics.median(math.log10(rate) for rate in rates)


def test_it_chooses_what_gained_most() -> None:
    assert abs(chosen(gains({10: 1e-2, 20: 1e-2}), 30) + 2) < 0.7


def test_what_was_best_early_is_not_what_is_best_late() -> None:
    seen = gains({10: 1e-1, 20: 10**-1.5, 30: 1e-2, 40: 10**-2.5})
    assert chosen(seen, 40) < chosen(seen, 10) - 0.7


def test_of_nothing_it_draws_and_what_is_listed_moves_as_under_pbt() -> None:
    found = [explored(TUNE, {LR: 0.5, ZERO: 1}, [], 10, random.Random(n)) for n in range(30)]
    assert len({config[LR] for config in found}) == 30
    assert all(1e-4 <= config[LR] <= 1.0 for config in found)
    assert {config[ZERO] for config in found} == {0, 1, 2}
    failed = [Gain(10, {LR: 0.1, ZERO: 0}, -math.inf)] * 9
    assert 1e-4 <= explored(TUNE, {LR: 0.5, ZERO: 1}, failed, 10, random.Random(0))[LR] <= 1.0


class TestRaysOwnPb2:
    """Why the values of PB2 are not chosen by Ray Tune."""

    def test_equal_seeds_and_results_give_other_values(self) -> None:
        """It searches from points of NumPy's global generator, which other code in the process uses as well."""
        seen = gains({10: 1e-2, 20: 1e-2, 30: 1e-2}, count=8)
        points = np.array([[gain.step, 1.0, gain.config[LR]] for gain in seen])
        values = np.array([gain.value for gain in seen])
        chosen_by_theirs = set()
        for drawn_before in range(3):
            np.random.seed(0)
            np.random.uniform(size=drawn_before)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _select_config(points, values, None, np.array([30, 1.0]), {LR: (1e-4, 1.0)}, 2)  # type: ignore[arg-type]
            chosen_by_theirs.add(float(found[0]))
        assert len(chosen_by_theirs) == 3
        assert (
            len({explored(TUNE, {LR: 0.5, ZERO: 1}, seen, 30, random.Random(0))[LR] for _ in range(3)}) == 1
        )

    def test_a_layout_is_no_range(self) -> None:
        with pytest.raises(ValueError, match="list or tuple of size 2"):
            PB2("step", "value", "min", hyperparam_bounds={ZERO: [0, 1, 2]})

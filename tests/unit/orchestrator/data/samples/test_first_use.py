"""The parts of a run's samples in the order in which its steps first read them."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.data.samples import first_use
from orchestrator.data.samples.first_use import FirstUse
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.order import Order


@pytest.mark.parametrize("at_once", [7, 2**20])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.5)])
def test_parts_have_each_sample_once_in_the_order_of_its_first_use(
    weights: tuple[float, float], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_use, "AT_ONCE", at_once)
    order = Order(5, (30, 20), weights)
    positions = 45
    wanted = list(dict.fromkeys(order.at(np.arange(positions))[1].tolist()))
    made = FirstUse(order, 50, positions, size=8)
    assert [sample for part in made.parts for sample in part] == wanted
    assert {len(part) for part in made.parts[:-1]} == {8}
    for number, part in enumerate(made.parts):
        assert [made.place(sample) for sample in part] == [(number, index) for index in range(len(part))]
    for sample in set(range(50)) - set(wanted):
        assert made.place(sample) is None


def test_a_longer_run_has_the_same_parts_first() -> None:
    order = Order(5, (50,), (1.0,))
    short, long, longer = (FirstUse(order, 50, positions, size=8) for positions in (20, 40, 500))
    for part, same in zip(short.parts[:-1], long.parts, strict=False):
        np.testing.assert_array_equal(part, same)
    assert sum(map(len, longer.parts)) == 50  # each sample of all epochs once


def test_an_order_that_ends_has_no_samples_after_its_end() -> None:
    from fractions import Fraction

    order = MixedOrder(3, (6, 6), [(0, (1, 1))], max_passes=(Fraction(1), Fraction(1)))
    assert order.size is not None
    assert sum(map(len, FirstUse(order, 12, 1000, size=5).parts)) <= 12

"""Which rank is slow, and when that is told."""

from __future__ import annotations

import pytest

from orchestrator.controller.stragglers import STEADY, Stragglers


def seen(*steps: tuple[float, ...]) -> list[tuple[int, float] | None]:
    stragglers = Stragglers()
    return [stragglers.see(busy) for busy in steps]


def test_a_rank_that_stays_slow_is_told_once() -> None:
    told = seen(*[(0.1, 0.25, 0.1)] * (2 * STEADY))
    assert [n for n, one in enumerate(told) if one] == [STEADY - 1]
    assert told[STEADY - 1] == (1, pytest.approx(2.5))


def test_of_two_ranks_the_slower_is_the_straggler() -> None:
    assert seen(*[(0.3, 0.1)] * STEADY)[-1] == (0, pytest.approx(3.0))


def test_it_is_told_again_after_it_was_well() -> None:
    slow, well = [(0.1, 0.3)] * STEADY, [(0.1, 0.1)]
    assert sum(one is not None for one in seen(*slow, *well, *slow)) == 2


@pytest.mark.parametrize(
    "busy",
    [(), (0.5,), (0.0, 0.0), (0.1, 0.14), (0.001, 0.004)],
    ids=["none", "alone", "unknown", "alike", "noise"],
)
def test_nobody_is_slow(busy: tuple[float, ...]) -> None:
    assert not any(seen(*[busy] * (2 * STEADY)))


def test_slowness_that_wanders_is_nobody_s() -> None:
    assert not any(seen(*[(0.1, 0.3), (0.3, 0.1)] * STEADY))

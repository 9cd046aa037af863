"""Which keys explain the differences between trials."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.tune.config import Dimension
from orchestrator.tune.report import importance

SPACE: dict[str, Any] = {
    "lr": Dimension(loguniform=(1e-4, 1e-1)),
    "other": Dimension(integer=(0, 4)),
    "kind": Dimension(choice=["a", "b"]),
}


def configs(count: int) -> list[dict[str, Any]]:
    return [
        {"lr": 10 ** (-4 + 3 * n / (count - 1)), "other": (n * 7) % 5, "kind": "ab"[n % 2]}
        for n in range(count)
    ]


def test_the_key_that_decides_is_first() -> None:
    trials = configs(8)
    found = importance(SPACE, trials, [math.log10(config["lr"]) for config in trials])
    assert next(iter(found)) == "lr"
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_value_that_is_best_in_the_middle_of_its_range_counts_too() -> None:
    trials = configs(16)
    found = importance(SPACE, trials, [(math.log10(config["lr"]) + 2.5) ** 2 for config in trials])
    assert found["lr"] > 0.6


def test_a_choice_that_decides_alone_explains_all() -> None:
    found = importance({"kind": SPACE["kind"]}, [{"kind": k} for k in "aabb"], [1.0, 1.0, 5.0, 5.0])
    assert found == {"kind": pytest.approx(1.0)}


def test_too_few_or_equal_trials_say_nothing() -> None:
    assert importance(SPACE, configs(3), [1.0, 2.0, 3.0]) == {}
    assert importance(SPACE, configs(5), [1.0] * 5) == {}

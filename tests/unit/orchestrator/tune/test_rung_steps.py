"""Where a trial stops to be judged."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.train.config import TrainSpec
from orchestrator.tune.config import TuneSpec
from orchestrator.tune.rung_steps import early_decision, longest_warmup, rungs


@pytest.mark.parametrize(
    ("tune", "expected"),
    [
        ({}, [90]),
        ({"scheduler": "asha"}, [6, 24, 90]),
        ({"scheduler": "asha", "warmup": 9}, [15, 60, 90]),
        ({"scheduler": "asha", "warmup": "20%"}, [24, 90]),
        ({"scheduler": "asha", "warmup": 9, "grace": 4}, [4, 16, 64, 90]),
        ({"scheduler": "asha", "warmup": {"choice": [0, 9]}}, [15, 60, 90]),
        ({"scheduler": "asha", "warmup": {"integer": [0, 9]}}, [15, 60, 90]),
        ({"scheduler": "asha", "optimizer": {"choice": [{"warmup": "10%"}, {}]}}, [15, 60, 90]),
        ({"scheduler": "median", "interval": 40, "warmup": 9}, [15, 40, 80, 90]),
        ({"scheduler": "asha", "reduction": 3}, [10, 30, 90]),
        ({"scheduler": "asha", "grace": 20, "reduction": 2}, [20, 40, 80, 90]),
        ({"scheduler": "hyperband", "reduction": 3}, [1, 3, 9, 10, 27, 30, 81, 90]),
        ({"scheduler": "pbt", "interval": 40}, [40, 80, 90]),
        ({"scheduler": "median", "interval": 40, "grace": 20}, [20, 40, 80, 90]),
        ({"promote": [{"at": 50, "set": {"resources.workers": 2}}]}, [50, 90]),
    ],
)
def test_rungs(tune: dict[str, Any], expected: list[int]) -> None:
    """The first decision comes after the warm-up of every trial, unless the job says otherwise."""
    search, train = search_of(**tune)
    assert rungs(search, train.steps, longest_warmup(search, train)) == expected


def search_of(warmup: Any = 0, optimizer: Any = None, **tune: Any) -> tuple[TuneSpec, TrainSpec]:
    """A search over jobs of 90 steps, whose warm-up may be one of its dimensions."""
    space: dict[str, Any] = {"train.optimizer.lr": {"uniform": [0.1, 0.2]}}
    if isinstance(warmup, dict):
        space["train.optimizer.warmup"] = warmup
        warmup = 3
    if optimizer is not None:
        space["train.optimizer"] = optimizer
    train = {"steps": 90, "global_batch": 8, "optimizer": {"lr": 0.1, "warmup": warmup}}
    return TuneSpec(space=space, trials=4, **tune), TrainSpec.model_validate(train)


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"scheduler": "asha", "warmup": 9}, []),
        ({"scheduler": "asha", "grace": 10, "warmup": 9}, []),
        ({"scheduler": "asha", "grace": 1}, []),
        ({"scheduler": "asha", "grace": 9, "warmup": 9}, ["step 9", "warm-up of 9 steps", "above 9"]),
        ({"scheduler": "median", "grace": 3, "warmup": 9}, ["median compares trials at step 3", "above 9"]),
        ({"scheduler": "hyperband", "warmup": 9}, ["hyperband compares trials at step 1", "asha"]),
        (
            {"scheduler": "asha", "warmup": 85},
            ["asha stops no trial", "warm-up of 85 steps is at step 91 of 90"],
        ),
        ({"scheduler": "hyperband"}, []),
        ({"scheduler": "pbt", "warmup": 9}, []),
        ({"warmup": 9}, []),
    ],
)
def test_a_decision_within_the_warm_up_or_behind_the_end_is_told(
    tune: dict[str, Any], words: list[str]
) -> None:
    search, train = search_of(**tune)
    line = early_decision(search, train.steps, longest_warmup(search, train))
    assert all(word in line for word in words)
    assert bool(line) == bool(words)


def test_rungs_are_those_of_tune_s_own_hyperband() -> None:
    from ray.tune.schedulers import HyperBandScheduler

    scheduler = HyperBandScheduler("step", max_t=90, reduction_factor=3)
    wanted = {min(90, scheduler._get_r0(s) * 3**i) for s in range(scheduler._s_max_1) for i in range(s + 1)}
    space = {"train.optimizer.lr": {"uniform": [0.1, 0.2]}}
    ours = rungs(TuneSpec(space=space, trials=4, scheduler="hyperband", reduction=3), 90, 0)  # type: ignore[arg-type]
    assert wanted <= set(ours)

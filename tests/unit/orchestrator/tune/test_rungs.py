"""Where a trial stops to be judged."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.tune.config import TuneSpec
from orchestrator.tune.rungs import rungs


@pytest.mark.parametrize(
    ("tune", "expected"),
    [
        ({}, [90]),
        ({"scheduler": "asha"}, [6, 24, 90]),
        ({"scheduler": "asha", "reduction": 3}, [10, 30, 90]),
        ({"scheduler": "asha", "grace": 20, "reduction": 2}, [20, 40, 80, 90]),
        ({"scheduler": "hyperband", "reduction": 3}, [1, 3, 9, 10, 27, 30, 81, 90]),
        ({"scheduler": "pbt", "interval": 40}, [40, 80, 90]),
        ({"scheduler": "median", "interval": 40, "grace": 20}, [20, 40, 80, 90]),
        ({"promote": [{"at": 50, "set": {"resources.workers": 2}}]}, [50, 90]),
    ],
)
def test_rungs(tune: dict[str, Any], expected: list[int]) -> None:
    space = {"train.optimizer.lr": {"uniform": [0.1, 0.2]}}
    assert rungs(TuneSpec(space=space, trials=4, **tune), 90) == expected  # type: ignore[arg-type]


def test_rungs_are_those_of_tune_s_own_hyperband() -> None:
    from ray.tune.schedulers import HyperBandScheduler

    scheduler = HyperBandScheduler("step", max_t=90, reduction_factor=3)
    wanted = {min(90, scheduler._get_r0(s) * 3**i) for s in range(scheduler._s_max_1) for i in range(s + 1)}
    space = {"train.optimizer.lr": {"uniform": [0.1, 0.2]}}
    ours = rungs(TuneSpec(space=space, trials=4, scheduler="hyperband", reduction=3), 90)  # type: ignore[arg-type]
    assert wanted <= set(ours)

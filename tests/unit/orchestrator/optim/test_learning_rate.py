from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from transformers import get_wsd_schedule

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.learning_rate import learning_rate
from orchestrator.train.config import TrainSpec

STEPS, WARMUP, DECAY = 40, 4, 10


def rates(steps: int = STEPS, **options: object) -> list[float]:
    spec = OptimizerSpec(lr=0.01, warmup=WARMUP, **options)  # type: ignore[arg-type]
    return [learning_rate(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_every_schedule_warms_up_to_its_highest_rate(schedule: str) -> None:
    found = rates(schedule=schedule, decay=DECAY if schedule == "wsd" else 0)
    assert found[:WARMUP] == [0.01 * (n + 1) / WARMUP for n in range(WARMUP)]
    assert max(found) == found[WARMUP - 1] == 0.01
    after = found[WARMUP - 1 :]
    assert after == sorted(after, reverse=True)
    assert min(after) > 0


def test_wsd_stays_and_then_falls_by_a_square_root() -> None:
    found = rates(schedule="wsd", decay=DECAY, final_lr=0.2)
    assert set(found[WARMUP - 1 : STEPS - DECAY]) == {0.01}
    for step in range(DECAY):
        share = 1 - math.sqrt(step / DECAY)
        assert found[STEPS - DECAY + step] == pytest.approx(0.01 * (0.2 + 0.8 * share))


def test_wsd_is_that_of_transformers() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    options = {"num_warmup_steps": 0, "num_decay_steps": DECAY, "num_stable_steps": STEPS - DECAY}
    theirs = get_wsd_schedule(optimizer, min_lr_ratio=0.2, decay_type="1-sqrt", **options)  # type: ignore[arg-type]
    spec = OptimizerSpec(lr=0.01, schedule="wsd", decay=DECAY, final_lr=0.2)
    for step in range(STEPS):
        assert learning_rate(spec, step, STEPS) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_inverse_sqrt_goes_on_from_where_the_warmup_ends(warmup: int) -> None:
    spec = OptimizerSpec(lr=0.01, warmup=warmup, schedule="inverse_sqrt")
    first = max(warmup, 1)
    assert learning_rate(spec, first - 1, STEPS) == 0.01
    assert learning_rate(spec, 4 * first - 1, STEPS) == pytest.approx(0.005)


@pytest.mark.parametrize("schedule", ["constant", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize("longer", [STEPS + 1, 3 * STEPS])
def test_what_is_settled_is_the_same_in_a_longer_run(schedule: str, longer: int) -> None:
    options = {"schedule": schedule, "decay": DECAY if schedule == "wsd" else 0}
    settled = OptimizerSpec(**options).settled(STEPS)  # type: ignore[arg-type]
    assert settled == (STEPS - DECAY if schedule == "wsd" else STEPS)
    assert rates(**options)[:settled] == rates(longer, **options)[:settled]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_over_the_whole_run_is_never_settled(schedule: str) -> None:
    assert OptimizerSpec(schedule=schedule).settled(STEPS) is None  # type: ignore[arg-type]
    assert rates(schedule=schedule)[WARMUP + 1] != rates(STEPS + 1, schedule=schedule)[WARMUP + 1]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"schedule": "wsd"}, "wsd has no decay"),
        ({"decay": 3}, "decay 3 is for schedule wsd, and this is cosine"),
        (
            {"schedule": "wsd", "warmup": 4, "decay": 17},
            "decay 17 is longer than the 16 steps after the",
        ),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(options: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        TrainSpec.model_validate({"steps": 20, "global_batch": 8, "optimizer": options})

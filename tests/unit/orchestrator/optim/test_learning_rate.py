from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

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


def test_a_range_test_rises_by_equal_factors() -> None:
    spec = OptimizerSpec(lr=0.5, schedule="range_test", first_lr=1e-4)
    found = [learning_rate(spec, step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx([0.5e-4 * 1e4 ** (step / (STEPS - 1)) for step in range(STEPS)])
    with pytest.raises(ValidationError, match="first_lr is for schedule range_test"):
        OptimizerSpec(first_lr=1e-4)
    assert OptimizerSpec().identity() == OptimizerSpec(schedule="cosine").identity()
    assert "first_lr" not in OptimizerSpec().identity()


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


def driven(schedule_of: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    """The rates of the updates of an optimizer of rate 1, whose schedule moves on after each."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, found = schedule_of(optimizer), []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


def ours_of_ten(schedule: str) -> list[float]:
    spec = OptimizerSpec(lr=1.0, warmup=4, schedule=schedule, final_lr=0.0)  # type: ignore[arg-type]
    return [learning_rate(spec, step, 10) for step in range(10)]


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_the_first_update_of_transformers_has_rate_0_and_all_after_the_warm_up_are_ours(
    schedule: str, theirs: Callable[..., Any]
) -> None:
    found, ours = driven(lambda optimizer: theirs(optimizer, 4, 10), 10), ours_of_ten(schedule)
    assert found[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ours[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[4:] == pytest.approx(ours[4:])
    assert found[-1] > 0


def test_the_first_and_the_last_update_are_those_of_torchtitan() -> None:
    """What `linear_warmup_stable_decay` of torchtitan 0.2.2 gives for 10 steps and a warm-up of 4: it adds a step to
    the end so that the last rate is not 0, and one to the warm-up so that the first is not."""
    theirs = [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0, *(1 - done / 6 for done in (1, 2, 3, 4, 5))]
    assert ours_of_ten("linear") == pytest.approx(theirs)


@pytest.mark.slow
def test_the_first_two_updates_of_deepspeed_have_rate_0_and_its_warm_up_is_logarithmic() -> None:
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    def of(*kind: str) -> list[float]:
        return driven(lambda optimizer: WarmupDecayLR(optimizer, 10, 0.0, 1.0, 4, *kind), 10)

    assert of() == pytest.approx([0, 0, 0.5, math.log(3) / math.log(4), 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6])
    assert of("linear")[:6] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert ours_of_ten("linear")[:2] == [0.25, 0.5]
    assert ours_of_ten("linear")[-1] == pytest.approx(1 / 6)


def test_wsd_of_transformers_falls_as_a_cosine_unless_told() -> None:
    found = driven(lambda optimizer: get_wsd_schedule(optimizer, 0, 4, 8), 8)
    spec = OptimizerSpec(lr=1.0, schedule="wsd", decay=4, final_lr=0.0)
    ours = [learning_rate(spec, step, 8) for step in range(8)]
    assert found[4:] == pytest.approx([0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(4)])
    assert ours[4:] == pytest.approx([1 - math.sqrt(n / 4) for n in range(4)])


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
        ({"decay": 3}, "decay 3 is for schedule wsd, but this is cosine"),
        (
            {"schedule": "wsd", "warmup": 4, "decay": 17},
            "decay 17 is longer than the 16 steps after the",
        ),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(options: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        TrainSpec.model_validate({"steps": 20, "global_batch": 8, "optimizer": options})

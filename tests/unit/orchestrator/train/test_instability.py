"""What counts as an instability, and what the exception says of it."""

from __future__ import annotations

import random

import pytest

from cluster.workers.error_kind import cause_of
from orchestrator.train.config import Reading, StabilitySpec
from orchestrator.train.instability import LossSpike, NonFinite, check_stable, spike, watched_answers
from orchestrator.train.training_progress import TrainingProgress
from workloads.errors import LogitsNotFinite, WorkloadError


@pytest.mark.parametrize(
    ("loss", "norm", "error", "text"),
    [
        (float("nan"), 1.0, NonFinite, "loss is nan at step 8, samples from position 56"),
        (3.0, float("inf"), NonFinite, "grad_norm is inf at step 8, samples from position 56"),
        (99.0, 1.0, LossSpike, "the median, at step 8, samples from position 56"),
    ],
)
def test_an_instability_names_its_step_and_its_samples(
    loss: float, norm: float, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        check_stable(loss, norm, losses(32), StabilitySpec(spike=6), 8, 56)
    cause = cause_of(raised.value)
    assert (cause.end, cause.kind, cause.step, cause.position) == ("raised", "unstable", 8, 56)


def test_a_loss_like_the_others_is_none() -> None:
    check_stable(3.0, 1.0, losses(32), StabilitySpec(spike=6), 8, 56)


def test_a_step_that_predicts_nothing_has_no_loss_that_could_jump() -> None:
    check_stable(None, 0.0, losses(32), StabilitySpec(spike=6), 8, 56)


def losses(count: int, seed: int = 1) -> list[float]:
    """Losses around 3 with a spread of 0.05."""
    rng = random.Random(seed)
    return [3.0 + rng.gauss(0, 0.05) for _ in range(count)]


def test_a_spike_is_told_by_the_spread_of_the_last_losses() -> None:
    stability, before = StabilitySpec(spike=6, window=32), losses(40)
    assert "deviations above" in spike(3.6, before, stability)
    assert spike(3.1, before, stability) == ""
    assert spike(1.0, before, stability) == ""
    assert spike(99.0, before, StabilitySpec()) == ""
    assert spike(99.0, before[:31], stability) == ""


def test_a_ripple_on_losses_that_stand_still_is_no_spike() -> None:
    stability = StabilitySpec(spike=6, window=8)
    assert spike(3.05, [3.0] * 8, stability) == ""
    assert spike(3.2, [3.0] * 8, stability) != ""


def test_only_the_last_losses_count() -> None:
    """What a commit carries, the last `window` losses, is all that the decision needs."""
    stability, before = StabilitySpec(spike=6, window=16), losses(200)
    assert spike(3.6, before, stability) == spike(3.6, before[-16:], stability) != ""


def test_answers_that_cannot_be_generated_are_an_instability_of_the_step() -> None:
    with pytest.raises(NonFinite) as found, watched_answers(5, 16):
        raise LogitsNotFinite
    assert (found.value.kind, found.value.step, found.value.position) == ("unstable", 5, 16)
    with pytest.raises(WorkloadError, match="an empty prompt"), watched_answers(5, 16):
        raise WorkloadError("an empty prompt")


def test_a_rollout_blames_its_step_and_an_evaluation_the_step_before_it() -> None:
    """An evaluation before all steps blames the first one."""
    for progress, blamed in (
        (TrainingProgress(), (1, 0)),
        (TrainingProgress(step=3, position=32), (3, 24)),
    ):
        with pytest.raises(NonFinite) as found, progress.evaluating(Reading(8)):
            raise LogitsNotFinite
        assert (found.value.step, found.value.position) == blamed
    with pytest.raises(NonFinite) as found, TrainingProgress(step=3, position=32).generating(Reading(8)):
        raise LogitsNotFinite
    assert (found.value.step, found.value.position) == (4, 32)

"""Dynamic loss scaling."""

from orchestrator.train.engines.loss_scale import GROW_AFTER, INITIAL_SCALE, LossScale


def test_an_overflow_halves_and_good_steps_double() -> None:
    scale = LossScale(True)
    assert scale.overflow()
    assert scale.value == INITIAL_SCALE / 2
    for _ in range(GROW_AFTER):
        scale.succeed()
    assert scale.value == INITIAL_SCALE


def test_an_overflow_begins_the_count_anew() -> None:
    scale = LossScale(True)
    for _ in range(GROW_AFTER - 1):
        scale.succeed()
    scale.overflow()
    scale.succeed()
    assert scale.value == INITIAL_SCALE / 2


def test_at_the_least_scale_a_step_may_not_be_skipped() -> None:
    scale = LossScale(True)
    while scale.value > 1:
        assert scale.overflow()
    assert not scale.overflow()


def test_other_precisions_are_not_scaled() -> None:
    scale = LossScale(False)
    for _ in range(GROW_AFTER):
        scale.succeed()
    assert scale.value == 1.0
    assert not scale.overflow()
    assert list(scale.pieces()) == []

"""Which prompts a rollout reads, and which it generates ahead."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

import pytest

from orchestrator.data.samples.batches import Batches
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.order import Order
from orchestrator.data.samples.skips import Skip
from orchestrator.parallel.layout import Layout
from orchestrator.train.config import Reading, StabilitySpec, TrainSpec
from orchestrator.train.instability import NonFinite
from orchestrator.train.rollouts.rollouts import Rollouts
from orchestrator.train.step_samples import StepPlan, StepReader
from orchestrator.train.training_progress import TrainingProgress
from workloads.errors import LogitsNotFinite

SIZE = 4
"""Prompts of a step."""


class Starts:
    """Returns, instead of the prompts of a step, where they begin."""

    def begin(self, **_: bool) -> None:
        pass

    def prompts(self, batches: Batches, position: int, count: int) -> int:
        assert count == SIZE
        return position


def starts(
    step: int, of: TrainingProgress, together: int = 1, order: Any = None, epochs: int = 1, **train: Any
) -> list[int]:
    """Return where the steps begin whose prompts the rollout after `step` steps reads."""
    spec = TrainSpec.model_validate({"steps": 8, "global_batch": SIZE, **train})
    plan = StepPlan(0, spec, Reading(SIZE, together, epochs), 32, draws=False, staleness=1)
    batches = Batches(cast(Any, None), order or Order(0, [1000], [1.0]))
    reader = StepReader(plan, Layout(), 0, batches, of, rollouts=cast(Rollouts, Starts()))
    return list(reader(step).prompts)


@pytest.mark.parametrize("known", [3, 4, 5])
@pytest.mark.parametrize("together", [1, 2])
def test_no_answers_are_generated_ahead_across_skipped_samples(known: int, together: int) -> None:
    """The commits at `known` and earlier do not have the answers to the prompts after the skip."""
    size = SIZE * together
    skip = Skip(5 * together + 1, start=5 * size, count=SIZE)
    of = TrainingProgress(step=known * together, position=known * size, skips=(skip,))
    found = {step: starts(step * together, of, together, steps=12 * together) for step in range(known, 8)}
    for step, found_then in found.items():
        first = step * size + (SIZE if step >= 5 else 0)
        steps = together if step == 4 else 2 * together
        assert found_then == [first + number * SIZE for number in range(steps)]


def test_a_skip_within_the_next_rollout_is_one_before_it_and_a_skip_within_this_one_is_none() -> None:
    of = TrainingProgress(skips=(Skip(7, start=6 * SIZE, count=2 * SIZE),))
    assert starts(0, of, together=4) == [0, 4, 8, 12]
    assert starts(4, of, together=4, steps=16) == [16, 20, 32, 36, 40, 44, 48, 52]


@pytest.mark.parametrize(("samples", "ahead"), [(32, 0), (35, 0), (36, 1), (100, 1)])
def test_nothing_is_generated_ahead_beyond_the_end_of_a_mixture(samples: int, ahead: int) -> None:
    """Eight steps read 32 prompts, and the run may be extended if there are more."""
    order = MixedOrder(0, [samples], [(0, [1])], [Fraction(1)])
    how = {"order": order, "optimizer": {"schedule": "constant"}}
    assert starts(6, TrainingProgress(), **how) == [24, 28]
    assert starts(7, TrainingProgress(), **how) == [28, 32][: 1 + ahead]


@pytest.mark.parametrize(("batches", "epochs"), [(1, 3), (2, 2), (3, 2)])
def test_a_progress_knows_the_batches_of_all_epochs_of_its_rollouts(batches: int, epochs: int) -> None:
    """Each rollout reads its batches once, and every epoch over it blames the batch that its step trains on."""
    reading = Reading(SIZE, batches, epochs)
    skips = (Skip(9, start=2 * SIZE, count=SIZE), Skip(20, start=8 * SIZE, count=2 * SIZE))
    progress = begun = TrainingProgress(skips=skips)
    rollout: list[int] = []
    for step in range(4 * reading.steps):
        if step % reading.steps == 0:
            rollout = starts(step, begun, batches, epochs=epochs, steps=40 * reading.steps)[:batches]
        assert progress.position_of_step(reading) == rollout[step % batches]
        progress = progress.after_step(0.1, 1, reading=reading, tokens=1, stability=StabilitySpec())
        last = rollout[step % batches]
        with pytest.raises(NonFinite) as blamed, progress.evaluating(reading):
            raise LogitsNotFinite
        assert (blamed.value.step, blamed.value.position) == (step + 1, last)
        assert progress.position == max(last + SIZE, progress.position)
        if (step + 1) % reading.steps == 0:  # a commit, from which the next attempt begins
            assert progress.position == rollout[-1] + SIZE
            begun = progress


def test_the_later_epochs_of_a_rollout_read_nothing() -> None:
    found = [starts(step, TrainingProgress(), 2, epochs=3, steps=24) for step in range(8)]
    assert found == [[0, 4, 8, 12], [], [], [], [], [], [8, 12, 16, 20], []]

"""What a run carries from step to step, and when it has gained nothing for long."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from orchestrator.checkpoint.evaluations import MEASURED
from orchestrator.evaluate.config import StopWhen
from orchestrator.parallel.arithmetic import ARITHMETIC, NEWEST, Arithmetic
from orchestrator.train.commit_meta import CARRIED
from orchestrator.train.training_progress import TrainingProgress


def after(values: list[float], stop_when: StopWhen) -> list[bool]:
    """Whether a run is on a plateau after each of these evaluations."""
    found, progress = [], TrainingProgress()
    name, _, metric = stop_when.metric.partition(".")
    for value in values:
        progress = progress.with_evaluation({name: {metric: value}}, stop_when)
        found.append(progress.is_on_plateau(stop_when))
    return found


@pytest.mark.parametrize(
    ("metric", "values", "ended"),
    [
        ("validation.loss", [3.0, 2.0, 2.5, 1.9, 2.0, 2.0], [False] * 5 + [True]),
        ("wiki.accuracy", [0.1, 0.3, 0.2, 0.2], [False, False, False, True]),
        ("validation.loss", [2.0, 2.0, 2.0], [False, False, True]),
        ("validation.loss", [float("nan"), 2.0, float("nan"), float("nan")], [False] * 3 + [True]),
    ],
)
def test_a_plateau_is_so_many_evaluations_without_gain(
    metric: str, values: list[float], ended: list[bool]
) -> None:
    assert after(values, StopWhen(metric=metric, patience=2)) == ended


def test_an_evaluation_of_nothing_gains_nothing() -> None:
    progress = TrainingProgress().with_evaluation({"validation": {"tokens": 0.0}}, StopWhen(patience=1))
    assert (progress.best, progress.stale) == (None, 1)


def test_a_gain_of_less_than_asked_is_none() -> None:
    """But gains add up: they are compared with the best value, not with the one before."""
    values = [2.0, 1.96, 1.92, 1.88, 1.87]
    assert after(values, StopWhen(patience=3, min_delta=0.1)) == [False] * 5
    assert after(values[:3], StopWhen(patience=2, min_delta=0.1)) == [False, False, True]


def test_a_commit_of_an_earlier_version_was_never_evaluated() -> None:
    progress = TrainingProgress.of_commit(7, 56, "abc", {"tokens": 99}, [])
    assert (progress.step, progress.position, progress.last_evaluation_step, progress.best) == (
        7,
        56,
        -1,
        None,
    )


def test_what_a_commit_says_goes_on() -> None:
    stop = StopWhen(patience=2)
    told = TrainingProgress(step=4).with_evaluation({"validation": {"loss": 2.0}}, stop)
    told = told.with_evaluation({"validation": {"loss": 3.0}}, stop)
    meta = {
        "tokens": 1,
        **{k: getattr(told, k) for k in ("last_evaluation_step", "evaluation", "best", "stale")},
    }
    again = TrainingProgress.of_commit(4, 0, "", meta, [])
    assert again.with_evaluation({"validation": {"loss": 2.5}}, stop).is_on_plateau(stop)


def test_a_metric_that_a_job_goes_on_with_is_not_compared_with_values_of_another() -> None:
    """A loss of 2 is a bound that no accuracy reaches, and what had gained nothing by one may gain by the other."""
    loss, accuracy = StopWhen(patience=2), StopWhen(metric="validation.accuracy", patience=2)
    told = TrainingProgress(step=4)
    for value in (2.0, 3.0, 3.0):
        told = told.with_evaluation({"validation": {"loss": value, "accuracy": 0.1}}, loss)
    meta = {"tokens": 1} | {key: value for key, value in dataclasses.asdict(told).items() if key in CARRIED}
    again = TrainingProgress.of_commit(4, 0, "", meta, [])
    assert again.is_on_plateau(loss)
    assert not again.is_on_plateau(accuracy)
    ended = []
    for value in (0.1, 0.2, 0.2, 0.2):
        again = again.with_evaluation({"validation": {"loss": 3.0, "accuracy": value}}, accuracy)
        ended.append(again.is_on_plateau(accuracy))
    assert ended == [False, False, False, True]


def test_a_value_over_other_text_is_no_bound_for_what_follows() -> None:
    """What had gained nothing over the first batches may gain over the whole set."""
    stop, few, whole = StopWhen(patience=2), {"batches": 1, "averaged": 0}, {"batches": None, "averaged": 0}
    meta = {"tokens": 1, "best": 1.0, "stale": 2, "best_of": stop.metric, MEASURED: few}
    assert TrainingProgress.of_commit(4, 0, "", meta, [], few).is_on_plateau(stop)
    again = TrainingProgress.of_commit(4, 0, "", meta, [], whole)
    assert not again.is_on_plateau(stop)
    assert again.with_evaluation({"validation": {"loss": 3.0}}, stop).best == 3.0
    assert TrainingProgress.of_commit(4, 0, "", {**meta, MEASURED: None}, [], whole).best == 1.0


@pytest.mark.parametrize(
    ("meta", "arithmetic"),
    [
        ({}, Arithmetic.WHOLE),
        ({"chunks_head": True}, Arithmetic.CHUNKED_HEAD),
        ({"chunks_head": True, "cuts_rows": True}, Arithmetic.CUT_ROWS),
        ({ARITHMETIC: json.loads(json.dumps(NEWEST))}, NEWEST),
    ],
)
def test_a_run_adds_in_the_order_that_it_began_with(meta: dict[str, Any], arithmetic: Arithmetic) -> None:
    """Another order gives sums with other bits."""
    assert TrainingProgress.of_commit(1, 8, "", {"tokens": 7, **meta}, ()).arithmetic is arithmetic
    assert TrainingProgress().arithmetic is NEWEST


def test_what_was_not_verified_so_far_is_taken_as_sound() -> None:
    def run(step: int, verified: int) -> TrainingProgress:
        return dataclasses.replace(TrainingProgress(), step=step, verified=verified)

    assert run(0, 0).sound_until(200) == 0
    assert run(390, 200).sound_until(200) == 200
    assert run(100_000, 0).sound_until(200) == 100_000

"""Which samples are left out after an instability, and what counts as one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.job.spec import TrainSpec
from orchestrator.job.stability import (
    Skip,
    StabilitySpec,
    is_before,
    is_unstable,
    lr_factor,
    merged,
    next_skip,
    on_record,
    spike,
    start_before,
    start_of,
    where,
)

SIZE = 8


def fault(step: int, position: int, name: str = "NonFinite") -> str:
    return f"rank 1 on node-1: {name}: loss is nan {where(step, position)} (loop.py:190)"


def train(**stability: Any) -> TrainSpec:
    return TrainSpec(steps=100, global_batch=SIZE, stability=StabilitySpec(**stability))


windows_strategy = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=5)


@given(windows=windows_strategy, commit=st.integers(0, 20))
def test_positions_are_those_of_a_list_without_the_windows(
    windows: list[tuple[int, int]], commit: int
) -> None:
    """The closed form against the list itself: batches in order, those in a window struck out. Windows may overlap."""
    skips = merged([Skip(1, first * SIZE, count * SIZE) for first, count in windows])
    struck = {position for s in skips for position in range(s.start, s.start + s.count, SIZE)}
    batches = [p for p in range(0, 100 * SIZE, SIZE) if p not in struck]
    after = batches[commit - 1] + SIZE if commit else 0
    assert [start_of(after, n, SIZE, skips) for n in range(20)] == batches[commit : commit + 20]
    assert [start_before(batches[commit], n, SIZE, skips) for n in range(commit + 1)] == batches[commit::-1]


def test_a_window_is_named_once_however_many_records_name_it() -> None:
    one, two = Skip(8, 56, 8), Skip(9, 72, 8, 0.5)
    assert merged([two.to_json()], [one], [json.loads(json.dumps(two.to_json()))]) == (one, two)
    events = [{"skipped": two.to_json()}, {"reason": "begun"}, {"skipped": None}]
    assert on_record(events) == (two,)


def test_the_learning_rate_is_lower_from_the_step_on() -> None:
    skips = [Skip(8, 56, 8, 0.5), Skip(12, 96, 8, 0.5)]
    assert [lr_factor(step, skips) for step in (7, 8, 11, 12, 13)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_fault_leaves_out_the_samples_of_its_step() -> None:
    assert next_skip(train(), (), fault(8, 56)) == Skip(8, 56, SIZE, 1.0)
    assert next_skip(train(skip=3, lr_scale=0.5), (), fault(8, 56, "LossSpike")) == Skip(8, 56, 24, 0.5)


def test_retries_are_counted_around_the_step() -> None:
    near = [Skip(8, 56, 8), Skip(7, 48, 24), Skip(10, 96, 8)]
    assert next_skip(train(retries=3), near, fault(9, 80)) is None
    assert next_skip(train(retries=4), near, fault(9, 80)) is not None
    assert next_skip(train(retries=3, window=8), near, fault(19, 160)) is not None
    assert next_skip(train(retries=0), (), fault(8, 56)) is None


def test_every_retry_takes_one_batch_before_it_too() -> None:
    """The windows of the retries hold one another; what was left out of the first is passed over in counting back."""
    first = next_skip(train(), (), fault(8, 56))
    assert first == Skip(8, 56, 8)
    second = next_skip(train(), [first], fault(8, 64))
    assert second == Skip(7, 48, 24)
    third = next_skip(train(), [first, second], fault(8, 80))
    assert third == Skip(6, 40, 48)
    assert next_skip(train(), [Skip(1, 0, 8)], fault(1, 8)) == Skip(1, 8, 8)


def test_a_commit_that_used_the_samples_is_none_to_go_on_from() -> None:
    skip = Skip(8, 56, 8)
    assert is_before(56, (), [skip])
    assert not is_before(57, (), [skip])
    assert is_before(80, [skip], [skip])
    assert not is_before(80, [skip], [skip, Skip(7, 48, 24)])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (fault(8, 56), True),
        (fault(8, 56, "LossSpike"), True),
        ("NonFinite: loss is nan at step 8", False),
        ("RuntimeError: loss is nan at step 8, samples from position 56", False),
        ("InjectedFault: injected at rank 0, step 6", False),
    ],
)
def test_only_an_instability_is_one(text: str, wanted: bool) -> None:
    assert is_unstable(text) is wanted


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

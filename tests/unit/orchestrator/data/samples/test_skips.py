"""Which samples are left out after an instability."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.samples.skips import (
    Skip,
    is_before,
    lr_factor,
    merged,
    next_skip,
    on_record,
    start_before,
    start_of,
)
from orchestrator.train.config import StabilitySpec

SIZE = 8

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


def test_what_was_left_out_in_a_decay_is_not_in_a_longer_run() -> None:
    stable, decay, later = Skip(8, 56, 8), Skip(9, 64, 8), Skip(11, 96, 8)
    extended = {"before": 12, "after": 20, "settled": 8, "step": 5}
    events = [{"skipped": stable.to_json()}, {"skipped": decay.to_json()}, {"extended": extended}]
    assert on_record(events) == (stable,)
    assert on_record([*events, {"skipped": later.to_json()}]) == (stable, later)
    assert on_record(events[2:], before=(stable, decay)) == (stable,)


def test_the_learning_rate_is_lower_from_the_step_on() -> None:
    skips = [Skip(8, 56, 8, 0.5), Skip(12, 96, 8, 0.5)]
    assert [lr_factor(step, skips) for step in (7, 8, 11, 12, 13)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_fault_leaves_out_the_samples_of_its_step() -> None:
    assert next_skip(StabilitySpec(), SIZE, (), 8, 56) == Skip(8, 56, SIZE, 1.0)
    assert next_skip(StabilitySpec(skip=3, lr_scale=0.5), SIZE, (), 8, 56) == Skip(8, 56, 24, 0.5)


def test_retries_are_counted_around_the_step() -> None:
    near = [Skip(8, 56, 8), Skip(7, 48, 24), Skip(10, 96, 8)]
    assert next_skip(StabilitySpec(retries=3), SIZE, near, 9, 80) is None
    assert next_skip(StabilitySpec(retries=4), SIZE, near, 9, 80) is not None
    assert next_skip(StabilitySpec(retries=3, window=8), SIZE, near, 19, 160) is not None
    assert next_skip(StabilitySpec(retries=0), SIZE, (), 8, 56) is None


def test_every_retry_takes_one_batch_before_it_too() -> None:
    """The windows of the retries hold one another; what was left out of the first is passed over in counting back."""
    first = next_skip(StabilitySpec(), SIZE, (), 8, 56)
    assert first == Skip(8, 56, 8)
    second = next_skip(StabilitySpec(), SIZE, [first], 8, 64)
    assert second == Skip(7, 48, 24)
    third = next_skip(StabilitySpec(), SIZE, [first, second], 8, 80)
    assert third == Skip(6, 40, 48)
    assert next_skip(StabilitySpec(), SIZE, [Skip(1, 0, 8)], 1, 8) == Skip(1, 8, 8)


def test_a_commit_that_used_the_samples_is_none_to_go_on_from() -> None:
    skip = Skip(8, 56, 8)
    assert is_before(56, (), [skip])
    assert not is_before(57, (), [skip])
    assert is_before(80, [skip], [skip])
    assert not is_before(80, [skip], [skip, Skip(7, 48, 24)])

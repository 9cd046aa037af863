"""Which batches steps read, compared with a list of all updates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.train.config import Reading


@given(batches=st.integers(1, 5), epochs=st.integers(1, 4), step=st.integers(0, 60))
def test_the_batches_of_steps_are_those_of_a_plain_loop(batches: int, epochs: int, step: int) -> None:
    reading = Reading(8, batches, epochs)
    updates = [
        (rollout * batches + number, epoch)
        for rollout in range(61)
        for epoch in range(1, epochs + 1)
        for number in range(batches)
    ]
    assert reading.batch_of(step) == updates[step][0]
    read = {batch for batch, _ in updates[:step]}
    assert reading.batches_before(step) == len(read)
    assert reading.samples_before(step) == 8 * len(read)
    batch = reading.batch_of(step)
    assert reading.first_step_of(8 * batch + 7) == updates.index((batch, 1))


def test_without_rollouts_a_step_reads_its_own_batch() -> None:
    reading = Reading(8)
    assert [reading.batch_of(step) for step in range(4)] == [0, 1, 2, 3]
    assert [reading.samples_before(step) for step in range(4)] == [0, 8, 16, 24]

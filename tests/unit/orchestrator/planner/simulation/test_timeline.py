"""Pipelines played event by event take what the published formulas say."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.planner.simulation.timeline import action_sequence, in_one_sequence, simulate_actions

FORWARD, BACKWARD = 1.0, 2.0


def played(schedule: str, ranks: int, parts: int, chunks: int = 1, link: float = 0.0, keep: bool = False):
    seconds = {"F": FORWARD, "B": BACKWARD, "I": FORWARD, "W": FORWARD}
    return simulate_actions(
        action_sequence(schedule, ranks, parts, max(chunks, 2)),
        lambda kind, stage: seconds[kind] / chunks,
        lambda a, b: link,
        keep,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (4, 8), (8, 32)])
def test_the_bubble_is_that_of_the_paper(schedule: str, ranks: int, parts: int) -> None:
    found = played(schedule, ranks, parts)
    assert found.busy == (parts * 3.0,) * ranks
    assert found.seconds == pytest.approx((parts + ranks - 1) * 3.0)


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    found = played("interleaved", 4, 16, chunks)
    assert found.seconds - 48.0 == pytest.approx(3 * 3.0 / chunks)


def test_splitting_the_backward_pass_takes_less_than_interleaving() -> None:
    seconds = [played(name, 4, 16, 2).seconds for name in ("interleaved", "zero_bubble", "zbv")]
    assert seconds[1] < seconds[0]
    assert seconds[2] <= seconds[1]
    assert seconds[2] >= 48.0


def test_what_travels_makes_the_pipeline_longer() -> None:
    assert played("1f1b", 4, 8, link=0.1).seconds > played("1f1b", 4, 8).seconds


def test_no_rank_does_two_things_at_once_and_nothing_begins_before_its_input() -> None:
    found = played("interleaved", 4, 8, 2, 0.05, keep=True)
    ended = {action: end for events in found.events for action, _, end in events}
    for events in found.events:
        for (_, _, end), (_, begin, _) in itertools.pairwise(events):
            assert begin >= end
        for (kind, stage, part), begin, _ in events:
            before = ("F", stage - 1, part) if kind == "F" else ("B", stage + 1, part)
            if before in ended:
                assert begin >= ended[before] + 0.05


def test_an_order_with_a_deadlock_is_refused() -> None:
    with pytest.raises(ValueError, match="deadlock"):
        in_one_sequence(((("F", 1, 0), ("F", 0, 0)),))

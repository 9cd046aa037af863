"""The planner's order of a pipeline's actions is that of the schedules which the engine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from orchestrator.parallel.layout import SCHEDULES, Layout, batch_problems
from orchestrator.planner.simulation.timeline import in_one_sequence, order

CLASSES = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torchs(schedule: str, ranks: int, parts: int) -> list[list[tuple[str, int, int]]]:
    """The order of torch's class, without processes: its own function for one rank's actions."""
    kind: Any = CLASSES[schedule]
    bare = kind.__new__(kind)
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = ranks, 2, parts
    bare.num_stages = 2 * ranks
    rounds = max(1, parts // ranks)
    bare.number_of_rounds, bare.microbatches_per_round = rounds, parts // rounds
    return [
        [
            (LETTERS[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in bare._calculate_single_rank_operations(rank)
            if a is not None
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize(
    ("ranks", "parts"), [(2, 2), (2, 8), (4, 4), (4, 12), (3, 9), (2, 1), (4, 3), (4, 10)]
)
def test_the_order_is_torchs(schedule: str, ranks: int, parts: int) -> None:
    assert [list(actions) for actions in order(schedule, ranks, parts)] == torchs(schedule, ranks, parts)


@pytest.mark.parametrize("schedule", ["1f1b", *CLASSES])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_numbers_of_micro_batches_are_those_that_torch_takes(schedule: str, ranks: int) -> None:
    """And none of them has a deadlock."""
    kind: Any = {"1f1b": Schedule1F1B, **CLASSES}[schedule]
    layout = Layout(pp=ranks, schedule=schedule)
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=number, num_stages=layout.stages, group_size=ranks, group_rank=0, submod=None,
            has_backward=True, device="cpu", is_first=number == 0, is_last=number == layout.stages - 1,
        )
        for number in layout.stages_of(0)
    ]  # fmt: skip
    taken = []
    for parts in range(1, 3 * ranks + 3):
        try:
            kind(stages if schedule != "1f1b" else stages[0], parts, loss_fn=lambda loss, _: loss)
        except ValueError:
            continue
        taken.append(parts)
        assert in_one_sequence(order(schedule, ranks, parts))
    assert [parts for parts in range(1, 3 * ranks + 3) if not batch_problems(layout, parts)] == taken


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_is_run_once(schedule: str) -> None:
    found = order(schedule, 4, 8)
    kinds = {"zero_bubble": "FIW", "zbv": "FIW"}.get(schedule, "FB")
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    flat = [action for actions in found for action in actions]
    assert len(flat) == len(set(flat))
    assert set(flat) == {(k, s, m) for k in kinds for s in range(4 * chunks) for m in range(8)}


def test_one_forward_one_backward_holds_at_most_as_many_as_stages_follow() -> None:
    for rank, actions in enumerate(order("1f1b", 4, 16)):
        held = most = 0
        for kind, _, _ in actions:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == 4 - rank

"""Which ranks of a hanging gang the others wait for, by what each reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.workers.gang import Cause, RankStatus
from cluster.workers.hang_report import Entered, HangReport
from cluster.workers.worker_context import Stage
from orchestrator.controller.hang_diagnosis import NAMED, missing_ranks
from orchestrator.controller.health import Vitals, first_fault

WORLD = (0, 1, 2, 3)


def entered(
    number: int, is_done: bool = False, group: str = "world", ranks: tuple[int, ...] = WORLD
) -> Entered:
    return Entered(group, number, f"collective {number} of {group}", is_done=is_done, ranks=ranks)


def rank(number: int, *entries: Entered, waits: bool | None = False, stage: int = 4) -> RankStatus:
    """A rank on a node of its own that waits for a message or not; None if it does not answer."""
    report = None if waits is None else HangReport(entries, "wait (a.py:3)" if waits else "f (b.py:7)", waits)
    doing = Stage(stage, f"at stage {stage}")
    return RankStatus(
        number, f"node-{number}", 1, "running", step=5, stage=doing, hang=report, last_heartbeat=100.0
    )


def slow(late: RankStatus, computes: bool = False) -> RankStatus:
    """A rank that computes, or else one that has sent a heartbeat since it was asked, and no answer."""
    if not computes:
        return dataclasses.replace(late, hang=HangReport(is_overdue=True))
    assert late.hang is not None
    return dataclasses.replace(late, hang=dataclasses.replace(late.hang, is_computing=True))


DONE, LATER = entered(16, is_done=True), entered(17)
PP, DP = (0, 1), (1, 3)

CASES: list[tuple[str, list[RankStatus], list[int], str]] = [
    (
        "one has not entered the collective of the others",
        [rank(0, DONE, LATER), rank(1, DONE, LATER), rank(2, DONE), rank(3, DONE, LATER)],
        [2],
        "3 ranks are in collective 17 of world, and it is not; its last was collective 16 of world; "
        "it was at stage 4 in f (b.py:7)",
    ),
    (
        "one does not answer",
        [rank(0, DONE, LATER), rank(1, waits=None), rank(2, DONE, LATER), rank(3, DONE, LATER)],
        [1],
        "3 ranks are in collective 17 of world, and it is not; the others last completed collective 16 of world; "
        "it was at stage 4; it does not answer",
    ),
    (
        "one holds up a stage of a pipeline, whose replica waits for the stage",
        [
            rank(0, entered(3, is_done=True, group="pp", ranks=PP)),
            rank(1, entered(8, is_done=True, group="dp", ranks=DP), waits=True),
            rank(2, waits=True),
            rank(3, entered(9, group="dp", ranks=DP)),
        ],
        [0],
        "2 ranks are in wait (a.py:3); its last was collective 3 of pp; it was at stage 4 in f (b.py:7)",
    ),
    (
        "one does not answer, and the others wait for messages of two ranks",
        [
            rank(0, entered(7, is_done=True), entered(2, is_done=True, group="tp", ranks=(0, 1)), waits=True),
            rank(1, entered(2, is_done=True, group="tp", ranks=(0, 1)), DONE, waits=True),
            rank(2, waits=None),
            rank(3, entered(9, is_done=True, group="dp", ranks=(2, 3)), DONE, waits=True),
        ],
        [2],
        "3 ranks are in wait (a.py:3); the others last completed collective 16 of world; it was at stage 4; "
        "it does not answer",
    ),
    (
        "two load while others wait to join",
        [rank(0, waits=True), rank(1, stage=2), rank(2, waits=True), rank(3, stage=1)],
        [1, 3],
        "2 ranks are in wait (a.py:3); it was at stage 2 in f (b.py:7)",
    ),
    (
        "one has begun fewer stages, and none waits in torch",
        [rank(0), rank(1), rank(2), rank(3, stage=1)],
        [3],
        "it was at stage 1 in f (b.py:7)",
    ),
    ("all are alike", [rank(number) for number in WORLD], [], ""),
    ("all are in one collective", [rank(number, LATER) for number in WORLD], [], ""),
    (
        "all wait, and one is not in the collective of the others",
        [rank(0, LATER), rank(1, LATER), rank(2, DONE, waits=True), rank(3, LATER)],
        [2],
        "3 ranks are in collective 17 of world, and it is not; its last was collective 16 of world; "
        "it was at stage 4 in wait (a.py:3)",
    ),
    (
        "one has entered nothing of its group, and others are no members of it",
        [
            rank(0, entered(2, group="tp", ranks=(0, 1))),
            rank(1, DONE),
            rank(2, waits=True),
            rank(3, waits=True),
        ],
        [1],
        "1 rank is in collective 2 of tp, and it is not; it has entered none of that group before; "
        "it was at stage 4 in f (b.py:7)",
    ),
    (
        "one sleeps, and another has not come because it is slow",
        [rank(0, DONE, LATER), slow(rank(1, DONE), computes=True), rank(2, DONE), rank(3, DONE, LATER)],
        [2],
        "2 ranks are in collective 17 of world, and it is not; its last was collective 16 of world; "
        "it was at stage 4 in f (b.py:7); rank 1 on node-1 is behind too, but computes",
    ),
    (
        "one sleeps, and another sends heartbeats but has not answered",
        [rank(0, DONE, LATER), slow(rank(1)), rank(2, DONE), rank(3, DONE, LATER)],
        [2],
        "2 ranks are in collective 17 of world, and it is not; its last was collective 16 of world; "
        "it was at stage 4 in f (b.py:7); rank 1 on node-1 sends heartbeats, but has not answered",
    ),
    (
        "one is silent, and another sends heartbeats but has not answered",
        [rank(0, DONE, LATER), slow(rank(1)), rank(2, waits=None), rank(3, DONE, LATER)],
        [2],
        "2 ranks are in collective 17 of world, and it is not; the others last completed collective 16 of world; "
        "it was at stage 4; it does not answer; rank 1 on node-1 sends heartbeats, but has not answered",
    ),
    (
        "one holds up a rank that holds up the others in another group",
        [
            rank(0, entered(4, group="dp", ranks=(0, 2))),
            rank(1, entered(2, is_done=True, group="tp", ranks=(1, 2))),
            rank(2, entered(3, is_done=True, group="dp", ranks=(0, 2)), entered(3, group="tp", ranks=(1, 2))),
            rank(3, waits=True),
        ],
        [1],
        "1 rank is in collective 3 of tp, and it is not; its last was collective 2 of tp; "
        "it was at stage 4 in f (b.py:7)",
    ),
    (
        "one computes, and all others wait",
        [rank(0, DONE, LATER), slow(rank(1, DONE), computes=True), rank(2, DONE, LATER), rank(3, waits=True)],
        [1],
        "2 ranks are in collective 17 of world, and it is not; its last was collective 16 of world; "
        "it was at stage 4 in f (b.py:7); it computes",
    ),
    (
        "one sends heartbeats but has not answered, and all others wait",
        [rank(0, DONE, LATER), slow(rank(1)), rank(2, DONE, LATER), rank(3, DONE, LATER)],
        [1],
        "3 ranks are in collective 17 of world, and it is not; the others last completed collective 16 of world; "
        "it was at stage 4; it sends heartbeats, but has not answered",
    ),
    ("none was asked", [rank(number, waits=None) for number in WORLD], [], ""),
]


@pytest.mark.parametrize(("what", "ranks", "missing", "why"), CASES, ids=[case[0] for case in CASES])
def test_missing_is_who_does_not_wait_while_others_do(
    what: str, ranks: list[RankStatus], missing: list[int], why: str
) -> None:
    """Asked for in ray#58878."""
    found = missing_ranks(ranks)
    assert [each.rank for each in found] == missing
    if found:
        assert found[0].why == why
        assert found[0].text == f"rank {missing[0]} on node-{missing[0]} is missing: {why}"


def fault_of(ranks: list[RankStatus], **changes: Any) -> tuple[str, int, str]:
    vitals = {"now": 100.0, "step": 5, "moved": 60.0, "suspected": 0.0, "longest_step": 0.1, "gap": 0.1}
    failure = first_fault(
        Vitals(**{**vitals, "ranks": tuple(ranks), "starting": False, "ending": False} | changes)
    )
    assert failure is not None
    return failure.text, failure.rank, failure.node


def test_the_fault_of_a_hang_names_the_missing_ranks_and_their_nodes() -> None:
    waiting = [rank(0, DONE, LATER), rank(1, DONE, LATER)]
    text, number, node = fault_of([*waiting, rank(2, DONE)])
    assert text.startswith(
        "rank 2 on node-2: no step for 40 s; 2 ranks are in collective 17 of world, and it is not"
    )
    assert (number, node) == (2, "node-2")
    text, number, _ = fault_of([*waiting, rank(2, DONE), rank(3, DONE)])
    assert text.startswith("rank 2 on node-2 and rank 3 on node-3: no step for 40 s; rank 2: 2 ranks are in")
    many = [rank(2 + n, DONE) for n in range(NAMED + 3)]
    text, _, _ = fault_of([*waiting, *many])
    assert "rank 5 on node-5 and 3 more: no step" in text
    text, number, _ = fault_of([rank(n, LATER) for n in WORLD])
    assert (text, number) == ("no step for 40 s; 4 ranks are in collective 17 of world", -1)


def test_the_fault_of_a_silence_names_what_others_wait_in_and_who_is_silent_too() -> None:
    """Ranks that still compute are not blamed for a silent one."""
    silent = RankStatus(1, "node-1", 1, "running", step=5, stage=Stage(4, "training"), last_heartbeat=90.0)
    text, number, _ = fault_of([rank(0, DONE, LATER), silent, rank(2), rank(3, waits=None)], moved=100.0)
    assert text.startswith(
        "rank 1 on node-1: no sign of life for 10.0 s; 1 rank is in collective 17 of world"
    )
    assert "it was training; it does not answer; rank 3 on node-3 is missing too" in text
    assert "rank 2" not in text
    assert number == 1
    text, _, _ = fault_of([rank(0, DONE, LATER), silent, rank(2), slow(rank(3))], moved=100.0)
    assert "missing too" not in text


def test_ranks_that_have_ended_are_not_missing() -> None:
    ended = RankStatus(2, "node-2", 1, "failed", cause=Cause("raised"), last_heartbeat=100.0)
    assert missing_ranks([rank(0, LATER), rank(1, LATER), ended]) == []

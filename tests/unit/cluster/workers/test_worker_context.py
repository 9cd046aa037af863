"""Rows on their way from a rank to the run directory: none is lost, none comes twice."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.workers.worker_context import RankInfo, WorkerContext

RANK_INFO = RankInfo(rank=0, world_size=2, local_rank=0, host="127.0.0.1", port=1)


def row(number: int) -> dict[str, Any]:
    return {"step": number}


def test_a_new_link_has_nothing_to_tell() -> None:
    link = WorkerContext(RANK_INFO)
    assert (link.step, link.stop_requested(), link.unsaved_rows(), link.take_rows(0, 0)) == (
        -1,
        False,
        [],
        (),
    )
    assert (link.rank_info, link.store) == (RANK_INFO, None)


def test_a_stop_is_seen() -> None:
    link = WorkerContext(RANK_INFO)
    link.request_stop()
    assert link.stop_requested()


def test_a_step_may_have_no_row() -> None:
    link = WorkerContext(RANK_INFO)
    link.report(1)
    link.report(2, row(2))
    assert (link.step, link.take_rows(0, 0)) == (2, (row(2),))


def test_rows_stay_until_they_are_stored() -> None:
    link = WorkerContext(RANK_INFO)
    for number in range(3):
        link.report(number, row(number))
    assert link.take_rows(0, 0) == (row(0), row(1), row(2))
    assert link.take_rows(3, 0) == ()
    assert link.unsaved_rows() == [row(0), row(1), row(2)]
    assert link.take_rows(3, 2) == ()
    assert link.unsaved_rows() == [row(2)]
    link.report(3, row(3))
    assert link.take_rows(3, 3) == (row(3),)
    assert link.unsaved_rows() == [row(3)]


def test_rows_are_held_back_until_their_steps_are_safe() -> None:
    """Commits carry them all the same."""
    link = WorkerContext(RankInfo(0, 2, 0, "host"))
    for step in (1, 2, 3):
        link.report(step, {"step": step}, hold=min(step, 2))
    link.changed.clear()
    assert [row["step"] for row in link.take_rows(0, 0)] == [1]
    link.release(1)
    assert not link.changed.is_set()
    link.release(2)
    assert link.changed.is_set()
    assert [row["step"] for row in link.take_rows(1, 1)] == [2]
    assert [row["step"] for row in link.unsaved_rows()] == [2, 3]
    link.report(4, {"step": 4})
    assert [row["step"] for row in link.take_rows(2, 1)] == [3, 4]


def test_the_list_of_unsaved_rows_is_the_caller_s() -> None:
    link = WorkerContext(RANK_INFO)
    link.report(0, row(0))
    link.unsaved_rows().clear()
    assert link.unsaved_rows() == [row(0)]


class Heartbeat(RuleBasedStateMachine):
    """Ranks report, gangs poll, controllers store; answers get lost and controllers lag."""

    def __init__(self) -> None:
        super().__init__()
        self.link, self.reported = WorkerContext(RANK_INFO), 0
        self.received: list[dict[str, Any]] = []
        self.saved = self.confirmed = 0

    @rule(count=st.integers(1, 4))
    def report(self, count: int) -> None:
        for _ in range(count):
            self.link.report(self.reported, row(self.reported))
            self.reported += 1

    @rule()
    def poll(self) -> None:
        self.received += self.link.take_rows(len(self.received), self.saved)
        self.confirmed = self.saved
        assert len(self.received) == self.reported

    @rule()
    def poll_whose_answer_is_lost(self) -> None:
        self.link.take_rows(len(self.received), self.saved)
        self.confirmed = self.saved

    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        self.saved = data.draw(st.integers(self.saved, len(self.received)))

    @invariant()
    def every_row_arrived_once_and_in_order(self) -> None:
        assert self.received == [row(n) for n in range(len(self.received))]

    @invariant()
    def a_commit_would_carry_all_that_is_not_known_to_be_stored(self) -> None:
        assert self.link.unsaved_rows() == [row(n) for n in range(self.confirmed, self.reported)]


Heartbeat.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHeartbeat = Heartbeat.TestCase


def test_two_threads_lose_nothing() -> None:
    link, total = WorkerContext(RANK_INFO), 5000
    writer = threading.Thread(target=lambda: [link.report(n, row(n)) for n in range(total)])
    writer.start()
    received: list[dict[str, Any]] = []
    while writer.is_alive() or link.unsaved_rows():
        received += link.take_rows(len(received), len(received))
    assert received == [row(n) for n in range(total)]
    assert link.step == total - 1

"""The queue of work between ranks and rollout workers, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.train.rollouts import work_queue
from orchestrator.train.rollouts.work_queue import QueueClient, RolloutQueue, worker_name


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutQueue]:
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.05)
    found = RolloutQueue("127.0.0.1")
    yield found
    found.close()


def client(queue: RolloutQueue, worker: str = "") -> QueueClient:
    return QueueClient(queue.address, queue.token, worker)


class Asking:
    """A rank that asks for units in a thread."""

    def __init__(self, queue: RolloutQueue, attempt: int, *names: str) -> None:
        self.found: dict[str, Any] = {}
        self.error: OSError | None = None
        self._asked = (client(queue), attempt, {name: {"unit": name} for name in names})
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        rank, attempt, units = self._asked
        try:
            rank.ask(attempt, units)
            self.found = {name: made.answers for name, made in rank.collect(list(units)).items()}
        except OSError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def taken(worker: QueueClient) -> work_queue.Work:
    while (work := worker.take()) is None:
        pass
    return work


def test_answers_reach_the_rank_that_asked_whoever_generates_them(queue: RolloutQueue) -> None:
    queue.servers = [{"node": "a", "address": "b"}]
    asked = [Asking(queue, 1, "0", "1"), Asking(queue, 1, "2")]
    workers = [client(queue, "x"), client(queue, "y")]
    done = 0
    while done < 3:
        work = workers[done % 2].take()
        if work is None:
            continue
        assert work.content == {"unit": work.name}
        workers[done % 2].give(work.name, [work.name * 3])
        done += 1
    for each in asked:
        each.join()
    assert asked[0].found == {"0": ["000"], "1": ["111"]}
    assert asked[1].found == {"2": ["222"]}
    assert workers[0].take() is None
    assert workers[0].servers() == [{"node": "a", "address": "b"}]


@pytest.mark.parametrize("how", ["it dies", "its machine is lost"])
def test_the_unit_of_a_lost_worker_goes_to_another(how: str, queue: RolloutQueue) -> None:
    asked = Asking(queue, 1, "0")
    name = worker_name("10.0.0.1", 7)
    lost, other = client(queue, name), client(queue, worker_name("10.0.0.1", 8))
    work = taken(lost)
    assert other.take() is None
    if how == "it dies":
        lost.close()
    else:
        queue.forget(name)
    again = taken(other)
    assert again == work
    other.give(again.name, 5)
    asked.join()
    assert asked.found == {"0": 5}
    late = client(queue, "z")
    assert not late.is_wanted("0")
    late.give("0", 6)  # of a worker that was only slow; nobody waits for it


def test_what_an_earlier_attempt_asked_for_is_forgotten_and_refused(queue: RolloutQueue) -> None:
    first = Asking(queue, 1, "old")
    worker = client(queue, "x")
    work = taken(worker)
    assert worker.is_wanted(work.name)
    second = Asking(queue, 2, "new")
    first.join()
    assert "a later attempt of the run began" in str(first.error)
    assert not worker.is_wanted(work.name)
    worker.give(work.name, 1)
    worker.give(taken(worker).name, 2)
    second.join()
    assert second.found == {"new": 2}
    zombie = Asking(queue, 1, "older")
    zombie.join()
    assert zombie.error is not None


def test_what_a_rank_asked_for_goes_with_it(queue: RolloutQueue) -> None:
    """Its weights are replaced soon, and a worker that looked for them would fail."""
    rank, worker = client(queue), client(queue, "x")
    rank.ask(1, {"0": {}})
    assert worker.is_wanted("0")
    rank.close()
    while worker.is_wanted("0"):
        pass
    assert worker.take() is None


def test_ranks_are_served_in_turn_and_wait_for_each_other_at_the_queue(queue: RolloutQueue) -> None:
    """In a collective they would wait with a limit that has nothing to do with how long answers take."""
    first, second, worker = client(queue), client(queue), client(queue, "x")
    first.ask(1, {"a0": {}, "a1": {}, "a2": {}})
    second.ask(1, {"b0": {}, "b1": {}})
    assert [taken(worker).name for _ in range(5)] == ["a0", "b0", "a1", "b1", "a2"]
    early = threading.Thread(target=first.meet, args=(1, "call", 0, 2), daemon=True)
    early.start()
    early.join(10 * work_queue.POLL_SECONDS)
    assert early.is_alive(), "the other rank has no answers yet"
    second.meet(1, "call", 1, 2)
    early.join(30)
    assert not early.is_alive()
    queue.begin(2)
    assert not worker.is_wanted("a0")
    with pytest.raises(PermissionError):
        first.meet(1, "next", 0, 2)


def test_what_ranks_wait_for_goes_before_what_is_asked_for_ahead(queue: RolloutQueue) -> None:
    rank, worker = client(queue), client(queue, "x")
    rank.ask(1, {"ahead0": {}, "ahead1": {}}, is_ahead=True)
    first = taken(worker)
    rank.ask(1, {"now0": {}, "now1": {}})
    order = [first, *(taken(worker) for _ in range(3))]
    assert [work.name for work in order] == ["ahead0", "now0", "now1", "ahead1"]
    for work in order:
        worker.give(work.name, work.name)
    assert {name: made.answers for name, made in rank.collect(["now0", "now1"]).items()} == {
        "now0": "now0",
        "now1": "now1",
    }
    ahead = rank.collect(["ahead0", "ahead1"])
    assert 0 < ahead["ahead0"].taken_after < ahead["ahead1"].taken_after
    worker.give("ahead0", "again")
    with pytest.raises(ConnectionError, match="forgot what this rank asked for"):
        rank.collect(["ahead0"])


def test_generation_begins_when_a_worker_takes_a_unit(queue: RolloutQueue) -> None:
    rank = client(queue)
    rank.ask(1, {"unit": {}}, is_ahead=True)
    time.sleep(0.1)  # without a rollout worker
    before = time.monotonic()
    worker = client(queue, "x")
    worker.give(taken(worker).name, 1)
    made = rank.collect(["unit"])["unit"]
    assert 0.1 <= made.taken_after <= made.finished_after
    assert made.finished_after - made.taken_after <= time.monotonic() - before


def test_a_wrong_token_is_refused(queue: RolloutQueue) -> None:
    with pytest.raises(OSError, match=r"."):
        QueueClient(queue.address, "guess", "x").take()


def test_the_queue_knows_whether_anything_is_left_to_ask_for(queue: RolloutQueue) -> None:
    rank = client(queue)
    rank.ask(2, {"0": {}}, is_ahead=True)
    assert not queue.is_finished
    rank.finish(2)
    assert queue.is_finished
    queue.begin(3)  # what is stored stays stored
    assert queue.is_finished
    with pytest.raises(PermissionError):  # a later attempt has begun
        rank.finish(2)
    rank.ask(3, {"1": {}})
    assert not queue.is_finished
    rank.close()

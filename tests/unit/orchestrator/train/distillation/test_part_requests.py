"""Rank 0 asks for the missing parts of a teacher's logits, in order, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.train.distillation import part_requests
from orchestrator.train.distillation.part_requests import PartRequests
from orchestrator.train.rollouts import work_queue
from orchestrator.train.rollouts.work_queue import QueueClient, RolloutQueue, Work
from orchestrator.train.task import RolloutAddress

PARTS = {f"{number:06d}.bin": range(4 * number, 4 * number + 4) for number in range(5)}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutQueue]:
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(part_requests, "AT_ONCE", 2)
    found = RolloutQueue("127.0.0.1")
    yield found
    found.close()


def requests_to(queue: RolloutQueue, attempt: int, finish: Callable[[], None]) -> PartRequests:
    return PartRequests(RolloutAddress(queue.address, queue.token, ""), attempt, PARTS, finish)


def wait_for(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 60, "waited a minute"
        time.sleep(0.01)


def test_parts_are_asked_for_in_order_and_a_few_at_once(queue: RolloutQueue) -> None:
    finished: list[bool] = []
    requests = requests_to(queue, 1, lambda: finished.append(queue.is_finished))
    worker = QueueClient(queue.address, queue.token, "worker")
    made: list[Work] = []
    while len(made) < len(PARTS):
        if (work := worker.take()) is not None:
            assert len(queue._units) <= 2
            made.append(work)
            worker.give(work.name, None)
    assert [work.name for work in made] == list(PARTS)
    assert [work.content["samples"] for work in made] == [list(part) for part in PARTS.values()]
    wait_for(lambda: queue.is_finished)
    assert finished == [False]  # the manifest is there before teacher workers end
    requests.check()
    worker.close()


def test_a_rank_that_waits_hears_why_nobody_answers(queue: RolloutQueue) -> None:
    requests = requests_to(queue, 1, lambda: None)
    wait_for(lambda: queue._units)
    requests.check()
    queue.begin(2)  # a later attempt has begun

    def is_told() -> bool:
        try:
            requests.check()
        except OSError:
            return True
        return False

    wait_for(is_told)

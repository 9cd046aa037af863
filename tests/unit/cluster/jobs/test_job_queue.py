"""What the autoscaler is asked for, without a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ray.autoscaler.sdk

from cluster.jobs import job_queue as queue
from cluster.jobs.admission import QueuedJob
from cluster.workers.gang import Bundle


def test_the_autoscaler_is_asked_again_since_it_keeps_only_the_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    clock = [100.0]
    monkeypatch.setattr(
        ray.autoscaler.sdk, "request_resources", lambda **words: asked.append(words["bundles"])
    )
    monkeypatch.setattr(queue, "alive", list)
    monkeypatch.setattr(queue.time, "monotonic", lambda: clock[0])
    line = queue.JobQueue()
    ticket = dataclasses.asdict(QueuedJob("a", 0, 1.0, Bundle(), 1, 2))
    for _ in range(5):
        line.ask(ticket, 2)
        clock[0] += 1.0
    assert asked == [[{"CPU": 1.0}] * 2] * 2, "at once, and after more than two seconds"
    line.leave("a")
    line.leave("a")
    assert asked[2:] == [[]], "nothing is asked for once, not for ever"

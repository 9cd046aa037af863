"""Workers that a run keeps ready in addition to its ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gang import Attempt, FakeGang

from cluster.workers.gang import Bundle, Cause, GangStatus, RankStatus
from cluster.workers.hang_report import HangReport
from orchestrator.config.spec import parse
from orchestrator.controller.hang_diagnosis import missing_ranks
from orchestrator.controller.health import Failure
from orchestrator.controller.workers import Workers
from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task


class Room(FakeGang):
    """A gang on a cluster with room for four workers. It records how many are kept ready."""

    def __init__(self) -> None:
        super().__init__(lambda attempt: iter(()), capacity=lambda: 4)
        self.kept: list[int] = []

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        self.kept.append(count)


class Unasked(FakeGang):
    """A gang whose script says what the ranks answer."""

    def print_stacks(self) -> None:
        """See `Gang.print_stacks`."""


def workers(room: FakeGang, folder: Path, spares: int, generating: int) -> Workers:
    cluster: Any = SimpleNamespace(gang=lambda: room, services=lambda *_: None)
    job = parse(
        {
            "name": "kept",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a.txt"}], "tokenizer": "t", "sequence_length": 64},
            "train": {"steps": 1, "global_batch": 4},
            "resources": {"workers": {"min": 1, "max": 4}, "spares": spares},
        }
    )
    return Workers(
        cluster,
        RunDir(str(folder)),
        demand_of(job),
        job.checkpoint,
        model=job.workload.model,
        generating=generating,
    )


def test_workers_and_spares_leave_room_for_rollout_workers(tmp_path: Path) -> None:
    """Else the ranks wait for answers that nobody has room to generate."""
    room = Room()
    there = workers(room, tmp_path, spares=2, generating=1)
    there.prewarm_first(4)
    assert room.kept == [3]
    there.capacity("wait", (), 0.0, lambda avoid: 0, frozenset())
    there.prewarm(3)
    there.prewarm(2)
    there.prewarm(1)
    assert room.kept == [3, 3, 3, 3]
    there.close()
    room = Room()
    alone = workers(room, tmp_path, spares=2, generating=0)
    alone.prewarm_first(4)
    alone.prewarm(3)
    assert room.kept == [4, 5]
    alone.close()


def test_a_rank_that_lives_is_told_from_a_silent_one_if_neither_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine an answer may come after all others, or too late; ray#58878 asks who is missing."""
    monkeypatch.setattr("orchestrator.controller.workers.DUMP", 0.0)
    monkeypatch.setattr("orchestrator.controller.workers.ANSWERS", 0.2)
    start = time.monotonic()
    quick, late, slow, silent = (
        RankStatus(n, "node", n + 1, "running", last_heartbeat=start - 30.0 * (n == 3)) for n in range(4)
    )

    def beats(attempt: Attempt) -> Iterator[GangStatus]:
        yield GangStatus((quick, late, slow, silent))
        answered = HangReport(frame="f (a.py:1)")
        now = time.monotonic()
        first = dataclasses.replace(quick, hang=answered), dataclasses.replace(late, last_heartbeat=now)
        yield GangStatus((*first, dataclasses.replace(slow, last_heartbeat=now), silent))
        last = dataclasses.replace(late, hang=answered)
        yield GangStatus((first[0], last, dataclasses.replace(slow, last_heartbeat=now + 0.1), silent))

    asking = workers(Unasked(beats), tmp_path, spares=0, generating=0)
    task = Task(job={}, layout={}, run=str(tmp_path), data="", attempt=1, restore=None, until=1)
    asking.start(Layout(dp=4), task)
    asking.poll(0)
    ranks = asking.ask_what_hangs(lambda: asking.poll(0) and None).ranks
    answers = [rank.hang for rank in ranks]
    assert answers == [HangReport(frame="f (a.py:1)")] * 2 + [HangReport(is_overdue=True), None]
    missing = [rank.text for rank in missing_ranks(ranks)]
    assert [text.split(" is missing")[0] for text in missing] == ["rank 3 on node"]
    asking.poll(0)
    assert asking.printed(Failure(0.0, 0, "", "", Cause("still"))) == missing
    asking.close()

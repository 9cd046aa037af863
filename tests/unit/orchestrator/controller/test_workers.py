"""Workers that a run keeps ready in addition to its ranks."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_gang import FakeGang

from cluster.workers.gang import Bundle
from orchestrator.config.spec import parse
from orchestrator.controller.workers import Workers
from orchestrator.planner.demand import demand_of
from orchestrator.storage.run_directory import RunDir


class Room(FakeGang):
    """A gang on a cluster with room for four workers. It records how many are kept ready."""

    def __init__(self) -> None:
        super().__init__(lambda attempt: iter(()), capacity=lambda: 4)
        self.kept: list[int] = []

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        self.kept.append(count)


def workers(room: Room, folder: Path, spares: int, generating: int) -> Workers:
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
    return Workers(cluster, RunDir(str(folder)), demand_of(job), job.checkpoint, generating=generating)


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

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import committer
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.committer import CommitOutcome, Committer
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.retention import Retention
from orchestrator.storage import atomic
from orchestrator.storage.retry import Retry

META = {"position": 1, "receipt": ""}
ONCE = Retry(1)
ONCE_KEPT = Retention(keep=1)


def committers(folder: Path, writers: int, attempt: str = "a", **options: Any) -> list[Committer]:
    return [
        Committer(Store(str(folder), attempt=attempt, retry=ONCE), writer, writers, **options)
        for writer in range(writers)
    ]


def together(group: list[Committer], step: int, meta: dict[str, Any] = META) -> list[CommitOutcome]:
    rows = torch.arange(len(group) * 2.0).reshape(len(group), 2) + step

    def commit(one: Committer) -> CommitOutcome:
        at = one.writer
        return one.commit(
            step, [TensorPiece("model.w", (len(rows), 2), (at, 0), rows[at : at + 1]).raw()], meta
        )

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(commit, group))


def test_writers_meet_in_the_folder(in_memory: Path) -> None:
    group = committers(in_memory, 3, retention=Retention(keep=2))
    for step in (1, 2, 3):
        assert [outcome.state for outcome in together(group, step)] == ["published", "written", "written"]
    store = group[0].store
    assert store.steps() == [2, 3]
    found = store.latest()
    assert found is not None
    assert store.reader(found).read("model.w").flatten().tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert {path.split("/")[-1].split("-")[0] for path in store.backend.list()} == {
        "LATEST",
        "manifest.json",
        "shard",
    }


def test_a_writer_that_never_comes_ends_the_save_and_leaves_nothing(in_memory: Path) -> None:
    group = committers(in_memory, 2, patience=0.2)
    (outcome,) = together(group[:1], 5)
    assert outcome.state == "failed"
    assert "writers [1] wrote nothing in 0.2 s" in outcome.reason
    assert group[0].store.backend.list() == {}


class Clock:
    """Time that passes only where it is waited for; after each second of it something happens."""

    def __init__(self, each_second: Callable[[int], None]) -> None:
        self.now, self._each_second = 0.0, each_second

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        for second in range(int(self.now) + 1, int(self.now + seconds) + 1):
            self._each_second(second)
        self.now += seconds


def test_a_writer_that_is_known_to_have_failed_is_not_waited_for(in_memory: Path) -> None:
    """Nor is one whose failure was of a step before."""
    group = committers(in_memory, 3, patience=30.0)
    group[0].failed = {0: -1, 1: 4, 2: 4}
    assert [outcome.state for outcome in together(group, 5)] == ["published", "written", "written"]
    threading.Timer(0.2, setattr, (group[0], "failed", {0: -1, 1: 4, 2: 6})).start()
    began = time.monotonic()
    (outcome,) = together(group[:1], 6)
    assert time.monotonic() - began < 25
    assert outcome.reason == "RuntimeError: writers [2] failed and could not report it"
    assert group[0].store.steps() == [5]


@pytest.mark.parametrize(("attempt", "state"), [("a", "published"), ("dead", "failed")])
def test_a_slow_writer_is_waited_for_while_its_files_come(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, attempt: str, state: str
) -> None:
    group = committers(in_memory, 2, patience=30.0)

    def work(second: int) -> None:
        if second % 20 == 0:
            group[1].store.backend.replace(f"step-00000005/shard-00001-{attempt}-{second}", bytes(second))
        if second == 500:
            group[1].commit(5, [TensorPiece("model.w", (2, 2), (1, 0), rows).raw()], META)

    clock = Clock(work)
    monkeypatch.setattr(committer, "time", clock)
    rows = torch.arange(2.0).reshape(1, 2)
    outcome = group[0].commit(5, [TensorPiece("model.w", (2, 2), (0, 0), rows).raw()], META)
    assert outcome.state == state, outcome.reason
    assert (clock.now > 500) == (state == "published")


def test_notes_of_a_dead_attempt_are_not_taken(in_memory: Path) -> None:
    dead, alive = committers(in_memory, 2, "dead"), committers(in_memory, 2, "alive", patience=0.2)
    together(dead[1:], 5)
    assert together(alive[:1], 5)[0].state == "failed"
    together(dead[1:], 6)
    assert together(alive, 6)[0].state == "published"


def test_a_gang_that_was_overtaken_writes_in_vain_and_removes_nothing(in_memory: Path) -> None:
    """Behind a cut network nobody can end it, and what it thinks is old may be what the next gang begins from."""
    old = committers(in_memory, 2, "old", retention=ONCE_KEPT)
    old[0].store.fence(1)
    meta = {**META, "attempt": 1}
    assert together(old, 4, meta)[0].state == "published"
    old[0].store.fence(2)
    outcome = together(old, 8, meta)[0]
    assert (outcome.state, "attempt 2 has taken over" in outcome.reason) == ("failed", True)
    assert old[0].store.steps() == [4]
    assert not [path for path in old[0].store.backend.list("step-00000008") if "shard-00000" in path]


class FullDisk:
    """An `os` whose disk has room for so many more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        with self.lock:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = os.write(fd, data[: self.room])
            self.room -= count
            return count


@pytest.mark.parametrize("room", [0, 5, 100, 300, 700, 1000])
def test_a_full_disk_leaves_no_half_commit(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    group = committers(in_memory, 2, patience=0.2)
    together(group, 1)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "os", FullDisk(room))
        failed = together(group, 2)
    assert failed[0].state == "failed"
    assert "No space left on device" in failed[0].reason + failed[1].reason
    assert group[0].store.steps() == [1]
    assert not any("step-00000002/shard" in path for path in group[0].store.backend.list())
    assert together(group, 3)[0].state == "published"


@pytest.mark.parametrize("keep", [1, None])
def test_what_another_writer_wrote_after_a_save_was_withdrawn_goes_with_the_next(
    in_memory: Path, keep: int | None
) -> None:
    """Also where the next fails as well, since a full disk needs the room, and where no commit is ever removed."""
    group = committers(in_memory, 2, retention=Retention(keep=keep), patience=0.05)
    store = group[0].store
    for step in (1, 2):
        assert together(group[:1], step)[0].state == "failed"
        assert store.backend.list() == {}
        assert group[1].commit(step, [], META).state == "written"
        assert store.backend.list(f"step-0000000{step}")
    assert together(group, 3)[0].state == "published"
    assert {path.split("/")[0] for path in store.backend.list()} == {"step-00000003", "LATEST"}


def test_why_another_writer_failed_is_said(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = committers(in_memory, 2)

    def broken(*_: object, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(group[1].store, "write_raw", broken)
    outcomes = together(group, 1)
    assert [outcome.state for outcome in outcomes] == ["failed", "failed"]
    assert "writer 1" in outcomes[0].reason
    assert "Read-only file system" in outcomes[0].reason


def test_a_failed_prune_does_not_undo_the_commit(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = committers(in_memory, 1, retention=Retention(keep=1))
    together(group, 1)

    def broken(path: str, durable: bool = False) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(group[0].store.backend, "remove", broken)
    (outcome,) = together(group, 2)
    assert outcome.state == "published"
    assert "old commits were not removed" in outcome.reason
    assert group[0].store.steps() == [1, 2]

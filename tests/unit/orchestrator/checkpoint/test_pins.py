"""Commits that something needs: no removal of old ones takes them away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pins import held, hold, holders, holding, release
from orchestrator.checkpoint.resolve_checkpoint import reading
from orchestrator.checkpoint.retention import Retention, prune, rewind
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.storage.process_identity import process_identity


@pytest.fixture
def store(in_memory: Path) -> Store:
    """One with commits at 1, 2, 3 and 4."""
    store = Store(str(in_memory))
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    for step in (1, 2, 3, 4):
        store.publish(step, store.write_raw(step, 0, [piece]), {"position": step, "receipt": ""})
    return store


def test_what_is_held_stays_until_it_is_released(store: Store) -> None:
    assert hold(store, 2, "the run of an adapter")
    assert hold(store, 2, "the run of an adapter")
    with holding(store, 2, "an export"):
        assert prune(store, Retention(keep=1)) == [1, 3]
        assert holders(store, 2) in (
            ["an export", "the run of an adapter"],
            ["the run of an adapter", "an export"],
        )
    assert prune(store, Retention(keep=1)) == []
    assert store.verify(2) == []
    release(store, 2, "the run of an adapter")
    assert prune(store, Retention(keep=1)) == [2]
    assert not any("step-00000002" in path for path in store.backend.list())


def test_a_mean_of_commits_is_held_whole(store: Store) -> None:
    assert hold(store, 3, "an export")
    assert prune(store, Retention(keep=1, averaged=1)) == [1]
    assert store.steps() == [2, 3, 4]


def test_what_is_gone_cannot_be_held_and_nothing_is_left_of_it(store: Store) -> None:
    prune(store, Retention(keep=1))
    assert not hold(store, 2, "an export")
    with pytest.raises(FileNotFoundError, match="step-00000002"), holding(store, 2, "an export"):
        pytest.fail("it is not there")
    assert not any("step-00000002" in path for path in store.backend.list())


def test_one_that_is_removed_while_it_is_held_is_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = store.backend.replace

    def late(path: str, data: bytes) -> None:
        prune(store, Retention(keep=1))
        replace(path, data)

    monkeypatch.setattr(store.backend, "replace", late)
    assert not hold(store, 2, "an export")
    assert not any("step-00000002" in path for path in store.backend.list())


def test_who_was_killed_holds_nothing_once_it_holds_another(store: Store) -> None:
    assert hold(store, 1, "an export")
    assert hold(store, 2, "another")
    assert hold(store, 3, "an export")
    assert held(store.backend.list()) == {2, 3}


def test_a_reader_that_was_killed_holds_nothing_once_old_commits_are_removed(store: Store) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True
    )
    gone = {**process_identity(os.getpid()), "pid": int(ended.stdout), "born": "1"}
    elsewhere = {**gone, "boot": "another machine"}
    assert hold(store, 1, "a reader that was killed", gone)
    assert hold(store, 2, "a reader on another machine", elsewhere)
    assert hold(store, 3, "a reader at work", process_identity(os.getpid()))
    assert prune(store, Retention(keep=1)) == [1]
    assert store.steps() == [2, 3, 4]
    assert not any("step-00000001" in path for path in store.backend.list())


def test_two_readers_of_one_process_hold_two_commits(store: Store) -> None:
    with reading(store, 1), reading(store, 3), reading(store, 3):
        assert held(store.backend.list()) == {1, 3}
        assert len(holders(store, 3)) == 2
    assert held(store.backend.list()) == set()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"process": 3}', b'{"process": {"pid": "x"}}'])
def test_a_hold_that_was_changed_by_hand_holds_all_the_same(store: Store, content: bytes) -> None:
    assert hold(store, 2, "an export")
    (path,) = [path for path in store.backend.list() if "/held-" in path]
    store.backend.replace(path, content)
    assert prune(store, Retention(keep=1)) == [1, 3]
    assert holders(store, 2) == []


def test_a_place_where_nothing_may_be_written_is_read_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, data: bytes) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(store.backend, "replace", refuse)
    with holding(store, 2, "an export"):
        assert store.verify(2) == []


def test_a_commit_that_never_was_is_not_held(store: Store) -> None:
    assert hold(store, 4, "an export")
    rewind(store, 2)
    assert not any("step-00000004" in path for path in store.backend.list())

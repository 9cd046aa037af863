"""Commits that a command reads while a run at work removes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.checkpoint.commit_store import LOOKS, Store
from orchestrator.checkpoint.pins import holders
from orchestrator.checkpoint.resolve_checkpoint import TRIES, read_chosen
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import InputError
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def store(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """One in which a command may not hold a commit."""
    store = Store(str(in_memory))
    replace = store.backend.replace

    def refuse(path: str, data: bytes) -> None:
        if "/held-" in path:
            raise PermissionError(path)
        replace(path, data)

    monkeypatch.setattr(store.backend, "replace", refuse)
    return store


@pytest.fixture
def writable(in_memory: Path) -> Store:
    return Store(str(in_memory))


@pytest.mark.parametrize("step", [None, 1])
def test_a_commit_stays_while_it_is_read(writable: Store, step: int | None) -> None:
    """A run at work removes it once the command is done."""
    commit(writable, 1)

    def read(number: int) -> list[str]:
        commit(writable, 2, 3)
        assert writable.verify(number) == []
        return holders(writable, number)

    (by,) = read_chosen(writable, step, read)
    assert f"process {os.getpid()} on " in by
    assert holders(writable, 1) == []
    assert writable.steps() == [1, 3]
    commit(writable, 4)
    assert writable.steps() == [4]
    assert not any("step-00000001" in path for path in writable.backend.list())


def commit(store: Store, *steps: int, keep: int = 1) -> None:
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    for step in steps:
        store.publish(step, store.write_raw(step, 0, [piece]), {"position": step, "receipt": ""})
        prune(store, Retention(keep=keep))


def test_nothing_is_written_into_a_run_that_has_ended(tmp_path: Path) -> None:
    """It removes nothing, and its directory may be an archive."""
    store = Store(str(tmp_path / "checkpoints"))
    commit(store, 1)
    run = RunDir(str(tmp_path))
    for phase, count in (("train", 1), ("stopped", 0), ("done", 0)):
        run.write_json("status.json", {"phase": phase})
        assert len(read_chosen(store, None, lambda step: holders(store, step))) == count


class AtWork:
    """A run that commits the next step while one below `until` is read."""

    def __init__(self, store: Store, until: int, keep: int = 1) -> None:
        self.store, self.until, self.keep, self.asked = store, until, keep, list[int]()

    def __call__(self, step: int) -> int:
        self.asked.append(step)
        if step < self.until:
            commit(self.store, step + 1, keep=self.keep)
            raise RuntimeError("a process that read it has ended")
        return step


def test_the_newest_is_read_where_the_one_before_was_removed(store: Store) -> None:
    commit(store, 1)
    run = AtWork(store, 2)
    assert (read_chosen(store, None, run), run.asked) == (2, [1, 2])


def test_one_that_is_named_is_told_to_be_gone(store: Store) -> None:
    commit(store, 1)
    run = AtWork(store, 9)
    with pytest.raises(
        InputError,
        match=r"a running job removed the checkpoint at step 1 while it was read; .*checkpoint\.keep",
    ):
        read_chosen(store, 1, run)
    assert run.asked == [1]


def test_a_run_that_commits_faster_than_it_is_read_is_given_up(store: Store) -> None:
    commit(store, 1)
    run = AtWork(store, 99)
    with pytest.raises(InputError, match="a running job removed the checkpoint at step 3 while it was read"):
        read_chosen(store, None, run)
    assert len(run.asked) == TRIES


def test_of_a_mean_an_earlier_one_may_be_gone(store: Store) -> None:
    commit(store, 1, 2, keep=2)
    run = AtWork(store, 3, keep=2)
    assert read_chosen(store, None, run) == 3


def test_what_fails_for_another_reason_is_raised_as_it_is(store: Store) -> None:
    commit(store, 1, 2, keep=2)

    def read(step: int) -> None:
        commit(store, step + 1, keep=2)
        raise InputError("no such prompt")

    with pytest.raises(InputError, match="no such prompt"):
        read_chosen(store, None, read)
    with pytest.raises(ZeroDivisionError):
        read_chosen(store, None, lambda step: step // 0)


def test_a_newest_that_is_removed_while_it_is_verified_is_no_damaged_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And looking for one ends."""
    commit(store, 1)
    check, until = store._check_bytes, 3

    def late(found: object) -> list[str]:
        newest = max(store.steps())
        if newest < until:
            commit(store, newest + 1)
        return check(found)

    monkeypatch.setattr(store, "_check_bytes", late)
    newest = store.latest()
    assert newest is not None
    assert (newest.step, store.skipped) == (3, [])
    until = 3 + LOOKS
    with pytest.raises(InputError, match="a running job removes each checkpoint while it is read"):
        store.latest()

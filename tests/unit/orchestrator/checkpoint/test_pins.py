"""Commits that something needs: no removal of old ones takes them away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import wait_for
from thin import every

from orchestrator.checkpoint import pins
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pins import hold, holders, holding, pinned_steps, release
from orchestrator.checkpoint.resolve_checkpoint import reading
from orchestrator.checkpoint.retention import Retention, prune, rewind
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.storage.process_identity import process_identity


@pytest.fixture
def store(in_memory: Path) -> Store:
    """One with commits at 1, 2, 3 and 4."""
    return with_commits(in_memory)


def with_commits(folder: Path) -> Store:
    store = Store(str(folder))
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
    assert pinned_steps(store.backend.list()) == {2, 3}


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


READER = """
import os, sys, time
from orchestrator.checkpoint import pins
from orchestrator.checkpoint.commit_store import Store
pins.RENEWAL = 0.2
own = pins.process_identity
pins.process_identity = lambda pid: {**own(pid), "boot": "another machine"}
time.time = lambda: 1.0  # its clock is wrong
with pins.holding(Store(sys.argv[1]), 2, "a reader elsewhere"):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ends", every(2, ["by itself", "killed"]))
def test_a_reader_on_another_machine_holds_for_as_long_as_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Nobody here can see whether it lives, but it renews its hold."""
    monkeypatch.setattr(pins, "LEASE", 1.5)
    store = with_commits(tmp_path)
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout
        assert reader.stdin
        assert reader.stdout.readline() == "holds\n"
        assert prune(store, Retention(keep=1)) == [1, 3]
        end = time.monotonic() + 2 * pins.LEASE
        while time.monotonic() < end:
            assert prune(store, Retention(keep=1)) == []
            time.sleep(0.1)
        assert holders(store, 2) == ["a reader elsewhere"]
        reader.kill() if ends == "killed" else reader.stdin.close()
        reader.wait()
    if ends == "killed":
        assert prune(store, Retention(keep=1)) == []
        wait_for(lambda: prune(store, Retention(keep=1)) == [2], "the end of its hold", 30)
    else:
        assert prune(store, Retention(keep=1)) == [2]
    assert store.steps() == [4]


def test_a_hold_without_renewals_is_judged_by_nobody_elsewhere(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote them, whose reader may live."""
    process = {**process_identity(os.getpid()), "boot": "another machine"}
    assert hold(store, 2, "a reader of an earlier version", process)
    (path,) = [path for path in store.backend.list() if "/held-" in path]
    content = json.loads(store.backend.read(path))
    del content[pins.RENEWED]
    store.backend.replace(path, json.dumps(content).encode())
    assert prune(store, Retention(keep=1)) == [1, 3]
    monkeypatch.setattr(pins, "LEASE", -1.0)
    assert prune(store, Retention(keep=1)) == []


def test_what_a_run_needs_for_good_does_not_end_with_a_process(store: Store) -> None:
    ended = {**process_identity(os.getpid()), "boot": "another machine"}
    assert hold(store, 2, "a run", ended)
    assert hold(store, 2, "a run")
    assert hold(store, 2, "a run", ended)
    (path,) = [path for path in store.backend.list() if "/held-" in path]
    assert json.loads(store.backend.read(path)) == {"by": "a run"}


def test_a_mark_of_tomorrow_is_made_anew(store: Store) -> None:
    assert hold(store, 2, "a reader", {**process_identity(os.getpid()), "boot": "another machine"})
    (path,) = [path for path in store.backend.list() if "/held-" in path]
    content = json.loads(store.backend.read(path))
    store.backend.replace(path, json.dumps({**content, pins.MARKED: time.time() + 86_400}).encode())
    assert prune(store, Retention(keep=1)) == [1, 3]
    assert json.loads(store.backend.read(path))[pins.MARKED] <= time.time()


def test_two_readers_of_one_process_hold_two_commits(store: Store) -> None:
    with reading(store, 1), reading(store, 3), reading(store, 3):
        assert pinned_steps(store.backend.list()) == {1, 3}
        assert len(holders(store, 3)) == 2
    assert pinned_steps(store.backend.list()) == set()


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

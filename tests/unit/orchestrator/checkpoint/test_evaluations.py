"""Evaluations that are added to commits: which commits wait for one, which is the best, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.evaluations import TO_EVALUATE, attach, attached, awaits, metrics_of
from orchestrator.checkpoint.retention import Retention, best_commit, prune, rewind
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.checkpoint.store import Store

BESIDE = Retention(keep=1, best="validation.loss", unevaluated=True)


@pytest.fixture
def store(in_memory: Path) -> Store:
    return Store(str(in_memory))


def commit(store: Store, step: int, wanted: bool = True, attempt: int = 1) -> None:
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    meta = {"position": step, "receipt": "", "attempt": attempt, TO_EVALUATE: wanted}
    store.publish(step, store.write_raw(step, 0, [piece]), meta)


def row(step: int, loss: float, attempt: int = 1) -> dict[str, Any]:
    return {
        "step": step, "attempt": attempt, "time": 1.0, "seconds": 1.0, "sets": {"validation": {"loss": loss}},
    }  # fmt: skip


def test_what_waits_is_kept_and_then_the_best(store: Store) -> None:
    for step in (0, 10, 20, 30, 35):
        commit(store, step, wanted=step != 35)
    assert prune(store, BESIDE) == []
    attach(store, row(0, 3.0))
    attach(store, row(10, 2.0))
    assert prune(store, BESIDE) == [0]
    assert best_commit(store, "validation.loss") == 10
    attach(store, row(20, float("nan")))
    assert prune(store, BESIDE) == [20]
    attach(store, row(30, 1.0))
    assert prune(store, BESIDE) == [10]
    assert store.steps() == [30, 35]
    assert metrics_of(store, store.manifest(30)) == {"validation.loss": 1.0}
    assert store.verify(30) == []


def test_one_of_a_commit_that_was_made_again_is_not_its(store: Store) -> None:
    commit(store, 10)
    attach(store, row(10, 2.0))
    assert not awaits(store, store.manifest(10))
    rewind(store, 0)
    assert list(store.backend.list()) == ["LATEST"]
    commit(store, 10, attempt=2)
    attach(store, row(10, 2.0))  # as by a controller that was overtaken
    assert awaits(store, store.manifest(10))
    assert metrics_of(store, store.manifest(10)) == {}


def test_a_damaged_one_is_made_again(store: Store, in_memory: Path) -> None:
    commit(store, 10)
    attach(store, row(10, 2.0))
    (file,) = in_memory.glob("*/evaluation.json")
    file.write_bytes(file.read_bytes().replace(b"2.0", b"1.0"))
    assert attached(store, store.manifest(10)) is None
    assert awaits(store, store.manifest(10))


def test_commits_of_earlier_versions_wait_for_nothing(store: Store) -> None:
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    store.publish(5, store.write_raw(5, 0, [piece]), {"position": 5, "receipt": ""})
    assert not awaits(store, store.manifest(5))

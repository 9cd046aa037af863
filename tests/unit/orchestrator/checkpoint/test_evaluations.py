"""Evaluations that are added to commits: which commits wait for one, which is the best, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from jobs import job

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import (
    MEASURED,
    TO_EVALUATE,
    attach,
    attached,
    awaits,
    measure_of,
    metrics_of,
)
from orchestrator.checkpoint.retention import Retention, best_commit, prune, remove, rewind
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.spec import parse

BESIDE = Retention(keep=1, best="validation.loss", unevaluated=True)


@pytest.fixture
def store(in_memory: Path) -> Store:
    return Store(str(in_memory))


def commit(
    store: Store,
    step: int,
    wanted: bool = True,
    attempt: int = 1,
    meta: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    told = {"position": step, "receipt": "", "attempt": attempt, TO_EVALUATE: wanted, **meta}
    store.publish(step, store.write_raw(step, 0, [piece]), told)


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


@pytest.mark.parametrize("beside", [False, True])
def test_a_value_that_was_measured_otherwise_is_not_compared(store: Store, beside: bool) -> None:
    """What is best over a few batches may be worse than all that is measured over the whole set."""
    few, whole = {"batches": 1, "averaged": 0}, {"batches": None, "averaged": 0}
    measures = ((10, 2.5, None), (20, 1.0, few), (30, 3.0, whole), (40, 4.0, whole))
    for step, loss, measured in measures:
        told = {"evaluation": {"validation.loss": loss}, "last_evaluation_step": step, MEASURED: measured}
        commit(store, step, beside, meta={} if beside else told)
        if beside:
            attach(store, row(step, loss) | ({MEASURED: measured} if measured else {}))
    assert best_commit(store, "validation.loss") == 10  # of an earlier version, which does not tell
    rewind(store, 30)
    assert prune(store, Retention(keep=1, best="validation.loss")) == [20]
    remove(store, 10, store.backend.list())
    assert best_commit(store, "validation.loss") == 30


def test_what_may_change_while_a_run_goes_on_and_decides_values_is_how_a_job_measures() -> None:
    document = job("none")

    def measure(where: str, last: int, **evaluate: Any) -> dict[str, int | None]:
        document["evaluate"] = {"sets": {"held": {"sources": [{"uri": "none"}]}}, "where": where, **evaluate}
        document["checkpoint"] = {"average": {"last": last}}
        return measure_of((asked := parse(document)).evaluate, asked.checkpoint.averaged)

    assert measure("gang", 3) == measure("gang", 4, every=7) == {"batches": None, "averaged": 0}
    assert measure("beside", 3) == {"batches": None, "averaged": 2}
    assert measure("gang", 3, batches=5) == {"batches": 5, "averaged": 0}

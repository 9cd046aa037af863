"""Which weights of a commit are evaluated and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.models.averaged import average_fields, weights_of

EMA = CheckpointSpec.model_validate({"every": 10, "average": {"ema": 0.9}})
LAST = CheckpointSpec.model_validate({"every": 10, "average": {"last": 3}})


def commit(store: Store, step: int, averaged: bool = False) -> CommitManifest:
    """A commit whose weights are all its step, and their average half of that."""
    pieces = [
        full_piece("model.w", torch.full((3, 4), float(step))),
        full_piece("model.bias", torch.full((2,), float(step))),
        full_piece("model.seen", torch.tensor(step)),
        full_piece("optim.step", torch.tensor(step)),
    ]
    pieces += [full_piece("average.w", torch.full((3, 4), step / 2))] if averaged else []
    meta = {"position": step, "receipt": "r", "loss": None}
    store.publish(step, store.write_shard(step, 0, pieces), meta)
    return store.manifest(step)


def test_a_moving_average_is_read_where_there_is_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with_, without = commit(store, 10, averaged=True), commit(store, 20)
    reader = weights_of(store, with_, EMA)
    assert reader.read("model.w", (1, 2), (2, 1)).tolist() == [[5.0], [5.0]]
    assert reader.read("model.bias").tolist() == [10.0, 10.0]
    assert int(reader.read("optim.step")) == 10
    assert average_fields(reader) == {"weights": "averaged"}
    for other in (
        weights_of(store, without, EMA),
        weights_of(store, without, EMA.model_copy(update={"average": None})),
        weights_of(store, without, LAST, raw=True),
    ):
        assert other.read("model.w").unique().tolist() == [20.0]
        assert average_fields(other) == {}
    assert weights_of(store, with_, EMA, raw=True).read("model.w").unique().tolist() == [10.0]


def test_the_last_commits_are_the_regular_ones(tmp_path: Path) -> None:
    """Of 3: step 34, where a fault left a commit, stands for itself only; what is not there is told."""
    store = Store(str(tmp_path))
    for step in (10, 20, 27, 30, 34, 40):
        commit(store, step)
    found = {step: weights_of(store, store.manifest(step), LAST) for step in (10, 30, 34, 40)}
    steps = {step: average_fields(reader)["averaged_steps"] for step, reader in found.items()}
    assert steps == {10: [10], 30: [10, 20, 30], 34: [20, 30, 34], 40: [20, 30, 40]}
    assert found[34].read("model.w", (0, 1), (1, 2)).tolist() == [[28.0, 28.0]]
    assert (found[40].read("model.bias").tolist(), int(found[40].read("model.seen"))) == ([30.0, 30.0], 40)
    assert prune(store, Retention(keep=1)) == [10, 20, 27, 30, 34]
    assert average_fields(weights_of(store, store.manifest(40), LAST))["averaged_steps"] == [40]


@pytest.mark.parametrize(
    "steps", [(10, 20, 30, 40, 50), (10, 15, 20, 30, 33, 40, 50), (10, 20, 30, 40, 44, 50)]
)
def test_the_commits_of_a_mean_are_kept(tmp_path: Path, steps: tuple[int, ...]) -> None:
    """Whatever interruptions add, of every commit the mean is that of the undisturbed run."""
    store = Store(str(tmp_path))
    for step in steps:
        commit(store, step)
        prune(store, Retention(keep=1, averaged=LAST.averaged, regular=LAST.every))
        there = average_fields(weights_of(store, store.manifest(step), LAST))["averaged_steps"]
        wanted = [*list(range(10, step, 10))[-2:], step]
        assert there == wanted
    assert store.steps() == [30, 40, 50]


def test_those_of_the_best_are_kept_too(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for step, loss in zip(range(10, 80, 10), (5, 4, 3, 2, 6, 7, 8), strict=True):
        pieces = store.write_shard(step, 0, [full_piece("model.w", torch.zeros(1))])
        store.publish(step, pieces, {"position": step, "receipt": "r", "loss": loss})
        prune(store, Retention(keep=1, best="", averaged=2, regular=10))
    assert store.steps() == [20, 30, 40, 50, 60, 70]

"""An exploit: a new run that begins with another's commit."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage


def committed(sweep: Path, run: str, step: int) -> Store:
    """A commit of one tensor whose values are the step."""
    store = Store(str(sweep / run / "checkpoints"))
    values = torch.full((4, 3), float(step))
    records = store.write_shard(step, 0, [TensorPiece("model.w", (4, 3), (0, 0), values)])
    store.publish(step, records, {"position": step, "receipt": "0" * 32})
    return store


def metrics(sweep: Path, run: str, first: int, last: int, value: float) -> None:
    row = {"loss": value, "attempt": 1, "time": 1.0, "step_seconds": 0.5}
    rows = [json.dumps({"step": step, **row}) for step in range(first, last + 1)]
    (sweep / run / "metrics.jsonl").write_text("\n".join(rows) + "\n")


def test_an_exploit_copies_the_commit_once_and_history_runs_through_it(tmp_path: Path) -> None:
    donor = committed(tmp_path, "0001", 8)
    committed(tmp_path, "0001", 12)
    metrics(tmp_path, "0001", 1, 12, 1.0)
    (tmp_path / "0000").mkdir()
    sweep = RunDir(str(tmp_path))
    assert lineage.exploit(sweep, "0000", "0001", 8, {"lr": 2}) == "0000-1"
    assert lineage.exploit(sweep, "0000", "0001", 8, {"lr": 2}) == "0000-1", "asked again after a restart"
    ours = Store(str(tmp_path / "0000-1" / "checkpoints"))
    assert ours.steps() == [8]
    assert ours.verify(8) == []
    there, here = (s.reader(s.manifest(8)).read("model.w") for s in (donor, ours))
    assert torch.equal(there, here)
    metrics(tmp_path, "0000-1", 7, 10, 2.0)
    assert lineage.runs_of(sweep, "0000") == ["0000", "0000-1"]
    assert [row["loss"] for row in lineage.history(sweep, "0000-1")] == [1.0] * 8 + [2.0] * 2
    assert lineage.own_steps(sweep, "0000-1", 10) == 2
    assert lineage.exploit(sweep, "0000", "0001", 8, {"lr": 3}) == "0000-2"


def test_where_the_donor_has_pruned_the_commit_the_next_one_is_taken(tmp_path: Path) -> None:
    committed(tmp_path, "0001", 12)
    sweep = RunDir(str(tmp_path))
    name = lineage.exploit(sweep, "0000", "0001", 8, {"lr": 2})
    assert lineage.origin(sweep, name) == {"donor": "0001", "asked": 8, "step": 12, "config": {"lr": 2}}


def test_an_exploit_that_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    """Its copy is of another commit, maybe, and not whole."""
    committed(tmp_path, "0001", 8)
    left = committed(tmp_path, "0000-1", 12)
    sweep = RunDir(str(tmp_path))
    assert lineage.exploit(sweep, "0000", "0001", 8, {"lr": 2}) == "0000-1"
    assert left.steps() == [8]
    assert left.verify(8) == []
    (tmp_path / "0000-1" / "origin.json").unlink()
    assert lineage.exploit(sweep, "0000", "0001", 8, {"lr": 2}) == "0000-1"
    assert left.verify(8) == []

"""Copying a commit into another store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.pieces import TensorPiece


@pytest.mark.parametrize("left", [0, 10, None], ids=["empty", "cut short", "whole"])
def test_a_copy_that_was_interrupted_is_completed(left: int | None, tmp_path: Path) -> None:
    source, target = (Store(str(tmp_path / name)) for name in ("source", "target"))
    records = []
    for writer in range(2):
        piece = TensorPiece("model.w", (2, 4), (writer, 0), torch.full((1, 4), float(writer)))
        records += source.write_shard(3, writer, [piece])
    source.publish(3, records, {"position": 0, "receipt": ""})
    (first, *_) = source.manifest(3).files
    path = next(path for path in source.backend.list() if path.endswith(first))
    whole = source.backend.read(path)
    target.backend.write(path, [whole[:left]])

    copy_commit(source, 3, target, {"from": "another"})
    assert target.verify(3) == []
    assert target.manifest(3).meta["from"] == "another"
    copy_commit(source, 3, target, {"from": "another"})

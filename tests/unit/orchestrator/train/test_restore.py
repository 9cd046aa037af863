"""Which store a rank restores a commit from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import Layout
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.retry import Retry
from orchestrator.train.restore import Restorer, placement_of
from orchestrator.train.task import Task


class Gone:
    """The memory of nodes of which one is gone."""

    def manifest(self, step: int) -> Any:
        raise ConnectionError("no node answers")


def restorer(folder: Path, peers: Any) -> Restorer:
    """That of a run whose store has a commit at step 880."""
    store = Store(str(folder / COMMITS))
    shard = store.write_shard(880, 0, [full_piece("model.a", torch.ones(3))])
    store.publish(880, shard, {"position": 0, "receipt": ""})
    run = str(folder)
    task = Task(job={}, layout=Layout().to_json(), run=run, data="", attempt=1, restore=None, until=900)
    return Restorer(task, peers, CheckpointSpec(), Retry(), measured={}, own_code={}, accepted=[])


def test_a_snapshot_that_nodes_took_along_is_passed_over_and_ends_no_run(tmp_path: Path) -> None:
    found = restorer(tmp_path, Gone())
    with pytest.raises(CorruptCommit, match="step 881 was only in the memory of nodes") as lost:
        found.open(881)
    assert (lost.value.step, lost.value.kind) == (881, "corrupt_commit")
    assert found.open(880)[0].step == 880
    with pytest.raises(InputError, match="there is no commit"):
        restorer(tmp_path / "other", None).open(881)


def test_each_part_is_held_on_the_rank_s_own_node_and_on_another() -> None:
    servers = [{"node": f"n{number}", "address": f"n{number}:1"} for number in range(3)]
    task = SimpleNamespace(snapshot_servers=servers, snapshot_token="t", attempt=4, token="gang")

    def of(rank: int, node: str) -> tuple[str, str]:
        place = placement_of(task, SimpleNamespace(rank_info=SimpleNamespace(rank=rank, node=node)))  # type: ignore[arg-type]
        assert place is not None
        return place.own, place.other

    assert [of(rank, "n1") for rank in range(3)] == [("n1:1", "n0:1"), ("n1:1", "n2:1"), ("n1:1", "n0:1")]
    assert of(1, "elsewhere") == ("", "n1:1")
    task.snapshot_servers = servers[:1]
    assert of(1, "n0") == ("n0:1", "")

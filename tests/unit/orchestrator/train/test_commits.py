"""Which store a rank restores a commit from, and the last commit of a task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.train import commits as module
from orchestrator.train.commits import Commits


class Gone:
    """The memory of nodes of which one is gone."""

    def manifest(self, step: int) -> Any:
        raise ConnectionError("no node answers")


def commits(folder: Path, peers: Any) -> Commits:
    """Those of a run whose store has a commit at step 880."""
    store = Store(str(folder))
    store.publish(
        880, store.write_shard(880, 0, [full_piece("model.a", torch.ones(3))]), {"position": 0, "receipt": ""}
    )
    found = object.__new__(Commits)
    found._store = store
    found._peers = lambda: peers  # type: ignore[method-assign]
    found._spec = parse({
        "name": "small", "workload": {"model": "gpt-tiny"}, "train": {"steps": 900, "global_batch": 8},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
    })  # fmt: skip
    found._context = SimpleNamespace(stop_requested=lambda: False)  # type: ignore[assignment]
    found._task = SimpleNamespace(evaluate_only=False)  # type: ignore[assignment]
    return found


def test_a_snapshot_that_nodes_took_along_is_passed_over_and_ends_no_run(tmp_path: Path) -> None:
    found = commits(tmp_path, Gone())
    with pytest.raises(CorruptCommit, match="step 881 was in the memory of nodes alone") as lost:
        found.open(881)
    assert (lost.value.step, lost.value.kind) == (881, "corrupt_commit")
    assert found.open(880)[0].step == 880
    with pytest.raises(InputError, match="there is no commit"):
        commits(tmp_path / "other", None).open(881)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_the_last_commit_rank_0_hears_from_the_others_before_it_waits_for_them(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Writer:
        """Of which the save has failed, as `close` finds out."""

        failed_step = -1

        def close(self, timeout: float) -> list[Any]:
            done.append("close")
            self.failed_step = 900
            return []

        def tell_failed(self, steps: Any) -> None:
            done.append(steps)

    def gathered(told: Any) -> Any:
        done.append(told)
        return [[-1, ""], [900, "the disk is full"]]

    agreed = SimpleNamespace(stop=True, failures=1)
    monkeypatch.setattr(module, "gather_json", gathered)
    monkeypatch.setattr(module, "agree", lambda *told, **_: done.append(told[2]) or agreed)
    found = commits(tmp_path, None)
    found._context = SimpleNamespace(rank_info=SimpleNamespace(rank=rank), set_waiting=lambda on: None)  # type: ignore[assignment]
    found._task = SimpleNamespace(restore=None)  # type: ignore[assignment]
    found._saved, found._saver, found._latest = 900, Writer(), (900, "it fails")  # type: ignore[assignment]
    if rank == 0:
        with pytest.raises(OSError, match="the commit at step 900 failed: it fails; the disk is full"):
            found.finish({"step": 900})
        assert done == [[-1, "it fails"], [-1, 900], "close", 1]
    else:
        found.finish({"step": 900})
        assert done == ["close", [900, "it fails"], [-1, 900], 0]

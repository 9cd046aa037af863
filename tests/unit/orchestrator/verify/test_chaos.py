from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from jobs import job

from cluster.local.local_cluster import claimed
from orchestrator.job.errors import InputError
from orchestrator.job.spec import parse
from orchestrator.verify import chaos


def test_a_second_chaos_is_refused_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with (
        claimed(chaos.CLUSTER, "chaos"),
        pytest.raises(InputError, match="another command is at work with the cluster 'chaos'"),
    ):
        chaos.chaos(parse(job("a.txt")), tmp_path / "runs", [("kill@1:2",)], lambda news: None)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]

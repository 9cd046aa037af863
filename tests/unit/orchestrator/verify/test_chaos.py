from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from jobs import job

from cluster.local.local_cluster import claimed
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.verify import chaos, chaos_faults


def test_a_second_chaos_is_refused_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with (
        claimed(chaos.CLUSTER, "chaos"),
        pytest.raises(InputError, match="another command is using the cluster 'chaos'"),
    ):
        chaos.chaos(parse(job("a.txt")), tmp_path / "runs", [("kill@1:2",)], lambda news: None)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


def test_only_faults_of_ranks_that_there_are_are_injected() -> None:
    document = job("a.txt")
    one, two = (
        parse({**document, "resources": {"workers": {"min": workers, "max": workers}}}) for workers in (1, 2)
    )
    alone = [text for run in chaos_faults.expand([], 0, 0, one.resources, one.train) for text in run]
    assert len(chaos_faults.expand([], 0, 0, two.resources, two.train)) == len(chaos_faults.STANDARD)
    assert not any("@1:" in text for text in alone)
    assert {text.partition("@")[0] for text in alone} >= {"kill", "raise", "nan", "driver", "flip"}

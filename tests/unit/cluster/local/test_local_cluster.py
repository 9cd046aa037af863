"""Two commands at once under one name: the second one is refused, and ends nothing of the first."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from cluster.local import local_cluster as loopback
from cluster.local.local_cluster import claimed
from cluster.local.node_processes import ClusterError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_second_start_ends_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, folder: Path, *_: object) -> None:
        (folder / "nodes" / "first").touch()
        with pytest.raises(ClusterError, match="another command is at work with the cluster 'a'"):
            loopback.up("a", [])
        assert (folder / "nodes" / "first").exists()
        with claimed("b", "up"), claimed("a", "chaos"):
            pass  # other names, and other purposes, are not in its way

    monkeypatch.setattr(loopback, "_up", start)
    loopback.up("a", [])
    assert loopback.down("a")


def test_what_failed_to_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ClusterError("no network")

    monkeypatch.setattr(loopback, "_up", fail)
    for _ in range(2):
        with pytest.raises(ClusterError, match="no network"):
            loopback.up("a", [])
    assert list(tmp_path.iterdir()) == []


def test_whoever_was_killed_holds_nothing() -> None:
    parent = loopback.folder_of("a").parent
    parent.mkdir()
    (parent / "a.up.lock").touch()
    with claimed("a", "up"):
        pass
    assert not parent.exists()

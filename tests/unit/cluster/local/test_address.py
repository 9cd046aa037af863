"""Which cluster is meant, and where its token is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.local import local_cluster as loopback
from cluster.local.address import ClusterAddress, NoCluster, resolve_address

VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of a user, no local cluster; what a test sets is undone."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(loopback.tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Callable[[str, int], loopback.LocalCluster]:
    """Makes the records of a cluster whose head is this very process."""

    def make(name: str, network: int) -> loopback.LocalCluster:
        folder = loopback.folder_of(name)
        (folder / "nodes").mkdir(parents=True)
        told = {"name": name, "folder": str(folder), "address": f"127.0.{network}.1:6379"}
        told |= {"dashboard": f"http://127.0.0.1:82{network}", "network": network}
        (folder / "cluster.json").write_text(json.dumps(told))
        me = psutil.Process()
        node = {"ip": f"127.0.{network}.1", "pid": me.pid, "born": me.create_time(), "head_address": ""}
        (folder / "nodes" / f"{node['ip']}.json").write_text(json.dumps(node))
        (folder / "token").write_text("abc")
        found = loopback.find(name)
        assert found is not None
        return found

    return make


def test_nothing_said_and_nothing_there() -> None:
    for said in (None, "auto"):
        with pytest.raises(NoCluster, match="no address is given, and no local cluster is up"):
            resolve_address(said)


def test_what_is_said_counts_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert resolve_address("10.0.0.2:6379") == ClusterAddress("10.0.0.2:6379", "10.0.0.2:6379")
    assert resolve_address("http://10.0.0.3:8265/") == ClusterAddress(
        "http://10.0.0.3:8265/", "", "http://10.0.0.3:8265"
    )
    for said in (None, "auto"):
        assert resolve_address(said) == ClusterAddress("10.0.0.1:6379", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://10.0.0.1:8265")
    assert resolve_address(None) == ClusterAddress(
        "http://10.0.0.1:8265", "10.0.0.1:6379", "http://10.0.0.1:8265"
    )
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_a_token_of_the_user_is_not_that_of_a_cluster_with_its_own(
    local: Callable[[str, int], loopback.LocalCluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray writes ~/.ray/auth_token where a program has none, also while a local cluster is up."""
    found = local("local", 32)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("another")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    place = resolve_address(None)
    assert place.ray == found.address
    assert place.token_path == found.environment()["RAY_AUTH_TOKEN_PATH"] == f"{found.folder}/token"
    assert not loopback.LocalCluster("b", str(tmp_path), "", "", 1).token_path


def test_the_local_cluster_is_meant_without_an_address_and_lends_its_token(
    local: Callable[[str, int], loopback.LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, default = local("a", 31), local("local", 32)
    for said in (None, "auto", default.address, default.dashboard):
        place = resolve_address(said)
        assert (place.ray, place.api) == (default.address, default.dashboard)
        assert place.token_path == f"{default.folder}/token"
    place = resolve_address(other.dashboard)
    assert (place.ray, place.token_path) == (other.address, f"{other.folder}/token")
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_a_head_that_is_gone_is_no_cluster(local: Callable[[str, int], loopback.LocalCluster]) -> None:
    found = local("local", 33)
    record = Path(found.folder) / "nodes" / "127.0.33.1.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "born": 1.0}))
    assert loopback.find("local") is None
    with pytest.raises(NoCluster):
        resolve_address(None)

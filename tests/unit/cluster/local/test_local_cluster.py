"""Two commands at once under one name, of which the second one ends nothing of the first; what is ended of a cluster
whose records do not name it; addresses of its nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.local import local_cluster as loopback
from cluster.local import node_processes
from cluster.local.local_cluster import LocalCluster, NodeSpec, claimed
from cluster.local.node_processes import OF_CLUSTER, ClusterError, start_nodes


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_second_start_ends_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, folder: Path, *_: object, **__: object) -> None:
        (folder / "nodes" / "first").touch()
        with pytest.raises(ClusterError, match="another command is using the cluster 'a'"):
            loopback.up("a", [])
        assert (folder / "nodes" / "first").exists()
        with claimed("b", "up"), claimed("a", "chaos"):
            pass  # other names, and other purposes, are not in its way

    monkeypatch.setattr(loopback, "_up", start)
    loopback.up("a", [])
    assert loopback.down("a")


def test_what_failed_to_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
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


@pytest.fixture
def process_of() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Starts a process of the cluster in a folder, without a record."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], env=os.environ | {OF_CLUSTER: str(folder)}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("there", [True, False], ids=["starting", "folder removed"])
def test_what_has_no_record_is_ended_too(
    there: bool, process_of: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    folder = loopback.folder_of("a")
    if there:
        (folder / "nodes").mkdir(parents=True)
    lost, other = process_of(folder), process_of(loopback.folder_of("b"))
    assert loopback.down("a")
    assert lost.wait(10) != 0
    assert other.poll() is None
    assert not folder.exists()
    assert not loopback.down("a")


def test_a_cluster_of_another_tmpdir_is_named_and_left_alone(
    process_of: Callable[[Path], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "theirs" / f"orchestrator-{os.getuid()}" / "a"
    process = process_of(folder)
    assert not loopback.down("a")
    assert loopback.elsewhere("a") == {str(folder): 1}
    assert loopback.elsewhere("b") == {}
    assert process.poll() is None


def test_a_cluster_goes_on_in_the_next_block_of_addresses(tmp_path: Path) -> None:
    """With paths that no two nodes share."""
    cluster = LocalCluster("a", str(tmp_path), "127.0.77.1:6379", "", 77)
    nodes = loopback.with_addresses(cluster, [NodeSpec("", "")] * 254)
    assert [node.ip for node in (nodes[0], nodes[252], nodes[253])] == [
        "127.0.77.2",
        "127.0.77.254",
        "127.1.77.2",
    ]
    assert len({node.short_name for node in nodes}) == 254
    assert nodes[0].short_name == "2"
    with pytest.raises(
        ClusterError, match="4048 nodes, and all addresses are used; end it with `cluster down`"
    ):
        loopback.with_addresses(cluster, [NodeSpec("", "")] * 4048)


def test_an_interruption_while_nodes_are_started_ends_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(node: NodeSpec, _: str) -> subprocess.Popen[bytes]:
        if node.ip == "127.0.77.3":
            os.kill(os.getpid(), signal.SIGINT)
        launched.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return launched[-1]

    launched: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(node_processes, "launch_node", launch)
    with pytest.raises(KeyboardInterrupt):
        start_nodes([NodeSpec(str(tmp_path), f"127.0.77.{number}") for number in (2, 3, 4)])
    assert [process.wait(10) for process in launched] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /a/b",
            "/a/b; its sockets are below TMPDIR: set it to a shorter path",
        ),
        (
            "Exception: The current node timed out during startup.",
            "timed out during startup; try again when this machine has less to do",
        ),
    ],
)
def test_a_node_that_does_not_start_says_what_to_do(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeSpec(str(tmp_path), "127.0.77.2")
    (tmp_path / f"node-{node.ip}.log").write_text(f"{line}\n")
    process = subprocess.Popen([sys.executable, "-c", ""])
    monkeypatch.setattr(node_processes, "launch_node", lambda *_, **__: process)
    with pytest.raises(ClusterError, match=re.escape(says)):
        start_nodes([node])
    process.wait(10)


def test_a_start_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line comes before its wait."""
    happened: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loopback, "start_nodes", lambda nodes: happened.append(f"{len(nodes)} wanted"))
    monkeypatch.setattr(loopback, "_wait_for_jobs_api", lambda _: happened.append("asked"))
    with pytest.raises(ClusterError, match="the head ended as soon as it was up"):
        loopback.up("t-says", [NodeSpec("", ""), NodeSpec("", "")], tell=happened.append)
    within = "(at most 120 s, usually some seconds)"
    assert happened == [
        f"starting the head {within}", "1 wanted", f"starting 2 nodes {within}", "2 wanted",
        f"waiting for the Jobs API {within}", "asked",
    ]  # fmt: skip


def test_a_node_that_takes_too_long_is_ended_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(node_processes, "launch_node", lambda *_, **__: process)
    monkeypatch.setattr(node_processes, "UP_TIMEOUT", 0.0)
    with pytest.raises(
        ClusterError, match="did not come up in 0 s; try again when this machine has less to do"
    ):
        start_nodes([NodeSpec(str(tmp_path), "127.0.77.2")])
    assert process.wait(60) == -signal.SIGKILL

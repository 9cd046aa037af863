"""`cluster up`, `add`, `remove` and `down`, as a user runs them: real nodes, and nothing left of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import orchestrator, wait_for
from s3 import free_ports

from cluster.local import local_cluster as loopback

NAME = "t-local"


def said(*words: object, cwd: Path, code: int = 0) -> Any:
    done = orchestrator("cluster", *words, "--name", NAME, "--json", cwd=cwd)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    try:
        yield tmp_path
    finally:
        loopback.down(NAME)


def processes_of(pids: list[int]) -> list[psutil.Process]:
    keepers = [psutil.Process(pid) for pid in pids]
    return [*keepers, *(child for keeper in keepers for child in keeper.children(recursive=True))]


def alive(processes: list[psutil.Process]) -> list[str]:
    return [p.name() for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_nodes_come_and_go_and_nothing_is_left(folder: Path) -> None:
    up = said("up", "--local", 1, "--gpus", 4, "--labels", '{"ray.io/market-type": "spot"}', cwd=folder)
    head, first = up["nodes"]
    assert (head["cpus"], first["cpus"], first["gpus"]) == (0, 1, 4)
    assert first["labels"] == {"ray.io/market-type": "spot"}
    assert len({node["ip"] for node in up["nodes"]}) == 2
    assert all(node["ip"].startswith("127.0.") for node in up["nodes"])

    again = orchestrator("cluster", "up", "--local", 1, "--name", NAME, cwd=folder)
    assert again.returncode == 2
    assert "a cluster is up already at" in again.stderr

    more = said("add", "--resources", '{"TPU": 2}', cwd=folder)
    assert [node["resources"] for node in more["nodes"]] == [{}, {}, {"TPU": 2.0}]
    gone = next(node for node in more["nodes"] if node["ip"] == first["ip"])
    lost = processes_of([gone["pid"]])
    assert len(lost) >= 3
    left = said("remove", first["ip"], "--abruptly", cwd=folder)
    assert [node["ip"] for node in left["nodes"]] == [head["ip"], more["nodes"][2]["ip"]]
    wait_for(lambda: not alive(lost), "the removed node's processes to be gone", 10)
    wrong = orchestrator("cluster", "remove", first["ip"], "--name", NAME, cwd=folder)
    assert wrong.returncode == 2
    assert "there is no node" in wrong.stderr

    everything = processes_of([node["pid"] for node in left["nodes"]])
    assert len(everything) > 6
    assert loopback.folder_of(NAME).exists()
    assert said("down", cwd=folder) == {"ended": True}
    assert alive(everything) == []
    assert not loopback.folder_of(NAME).exists()
    assert said("down", cwd=folder) == {"ended": False}
    said("show", cwd=folder, code=2)


@pytest.mark.slow
def test_a_head_that_was_killed_is_no_cluster_and_makes_way(folder: Path) -> None:
    up = said("up", "--local", 1, cwd=folder)
    everything = processes_of([node["pid"] for node in up["nodes"]])
    everything[0].kill()
    wait_for(lambda: loopback.find(NAME) is None, "the head to be missed", 10)
    said("show", cwd=folder, code=2)
    anew = said("up", "--local", 0, cwd=folder)
    assert len(anew["nodes"]) == 1
    psutil.wait_procs(everything, timeout=15)
    assert alive(everything) == []


UP = """
import sys
from cluster.local import local_cluster
local_cluster.DASHBOARD_PORT = int(sys.argv[2])
print(local_cluster.up(sys.argv[1], []).dashboard)
"""


@pytest.mark.slow
def test_clusters_that_start_at_once_get_ports_of_their_own(tmp_path: Path) -> None:
    names, port = ("t-at-once-1", "t-at-once-2"), str(free_ports(1).pop())
    try:
        words = [[sys.executable, "-c", UP, name, port] for name in names]
        starts = [subprocess.Popen(w, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for w in words]
        found = {start.communicate(timeout=200)[0].strip() for start in starts}
        assert [start.returncode for start in starts] == [0, 0]
        assert len(found) == 2
        assert f"http://127.0.0.1:{port}" in found
    finally:
        for name in names:
            loopback.down(name)

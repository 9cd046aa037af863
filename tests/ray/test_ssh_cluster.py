"""A cluster on hosts that are reached over ssh: two real servers of ssh on loopback addresses of this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from jobs import job, orchestrator, rows, wait_for, write_text
from ssh_servers import SSHD, Servers

from cluster.local.ports import free_port

NAME = "t-ssh"
HEAD, FIRST, SECOND = "127.0.33.1", "127.0.33.2", "127.0.33.3"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SSHD, reason="sshd is not installed")]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path, free_port(FIRST, 2222))
    for address in (FIRST, SECOND):
        found.start(address)
    yield found
    orchestrator("cluster", "down", "--name", NAME, cwd=tmp_path)
    found.close()


def up(servers: Servers, *hosts: str) -> tuple[int, dict[str, object], str]:
    (servers.folder / "hosts").write_text("\n".join(hosts))
    done = orchestrator(
        "cluster", "up", "--hosts", "hosts", "--ssh", servers.ssh, "--name", NAME, "--address", HEAD, "--json",
        cwd=servers.folder,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def of_hosts() -> list[int]:
    """Processes of nodes on hosts."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "cluster.remote.node_watchdog" in words and any(FIRST in w or SECOND in w for w in words):
            found.append(process.pid)
    return found


def folders() -> set[Path]:
    """Those that hosts keep their nodes in."""
    base = Path(os.environ.get("TMPDIR", "/tmp")) / f"orchestrator-{os.getuid()}"
    return set(base.glob("h-*"))


@pytest.mark.timeout(600)
def test_a_run_on_two_hosts_and_nothing_left_of_them(servers: Servers) -> None:
    """And a host that cannot be asked to end its node ends it by itself."""
    before = folders()
    code, told, error = up(servers, f"{FIRST} cpus=1", f"{SECOND} cpus=1 gpus=0")
    assert code == 0, error
    assert [host["ip"] for host in told["hosts"]] == [FIRST, SECOND]
    (new,) = {folder.stat().st_mode & 0o777 for folder in folders() - before}
    assert new == 0o700
    document = job(write_text(servers.folder / "corpus"))
    document["resources"] = {"workers": 2}
    document["data"]["cache"] = str(servers.folder / "cache")
    (servers.folder / "job.yaml").write_text(yaml.safe_dump(document))
    run = servers.folder / "run"
    where = ["--address", told["environment"]["RAY_ADDRESS"]]
    done = orchestrator("run", "job.yaml", "--run-dir", str(run), *where, cwd=servers.folder)
    assert done.returncode == 0, done.stderr
    assert len(rows(run)) == 12
    assert {row["node"] for row in rows(run, "nodes.jsonl")} == {FIRST, SECOND}
    servers.stop(SECOND)
    done = orchestrator("cluster", "down", "--name", NAME, cwd=servers.folder)
    assert done.returncode == 0
    assert f"by itself because the head is gone: {SECOND}: ssh: connect to host {SECOND}" in done.stderr
    wait_for(lambda: not of_hosts() and folders() == before, "the node to end by itself", 120)


@pytest.mark.timeout(300)
def test_where_one_host_cannot_none_is_left(servers: Servers) -> None:
    before = folders()
    servers.stop(SECOND)
    began = time.monotonic()
    code, _, error = up(servers, f"{FIRST} cpus=1", f"{SECOND} cpus=1")
    assert code == 2
    assert f"{SECOND}: ssh: connect to host {SECOND} port {servers.port}: Connection refused" in error
    assert time.monotonic() - began < 150
    wait_for(lambda: not of_hosts() and folders() == before, "what was started to end", 20)
    done = orchestrator("cluster", "show", "--name", NAME, cwd=servers.folder)
    assert "no local cluster is up" in done.stderr

"""A process that has its device ready before there is a rank for it: used at once, never needed, never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ready_targets
from rank_requests import rank, wait_for

from cluster.workers.fork_server import ForkServer
from cluster.workers.heartbeat import HeartbeatServer

TARGET = "ready_targets:wait"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "ready"
    found.touch()
    monkeypatch.setenv(ready_targets.LOG, str(found))
    return found


@pytest.fixture
def fork_server(log: Path) -> Iterator[ForkServer]:
    found = ForkServer(TARGET, stands_by=True, settle=0.0)
    yield found
    found.close()


def standby(log: Path, number: int) -> int:
    """The process id of the standby of that number, once it is as good as ready."""
    wait_for(lambda: len(log.read_text().split()) >= number)
    time.sleep(0.05)
    return int(log.read_text().split()[number - 1])


def runs(server: HeartbeatServer, pid: int) -> None:
    wait_for(lambda: (r := server.poll(0, 0.0).ranks[0]).state == "running" and r.pid == pid)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_next_rank_begins_in_the_standby_and_another_follows(
    fork_server: ForkServer, server: HeartbeatServer, log: Path
) -> None:
    first = standby(log, 1)
    large = "x" * 2_000_000  # more than a socket holds
    assert fork_server.launch(**rank(server, TARGET, large=large)) == first
    runs(server, first)
    second = standby(log, 2)
    assert fork_server.exits() == {}
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: fork_server.exits() == {first: -signal.SIGKILL})
    assert fork_server.launch(**rank(server, TARGET)) == second
    runs(server, second)
    third = standby(log, 3)
    fork_server.end_ranks()
    assert gone(second)
    assert not gone(third)
    assert fork_server.exits() == dict.fromkeys((first, second), -signal.SIGKILL)
    fork_server.close()
    wait_for(lambda: gone(third))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_that_was_killed_or_frozen_costs_a_second_at_most(
    fork_server: ForkServer, server: HeartbeatServer, log: Path, how: signal.Signals
) -> None:
    useless = standby(log, 1)
    os.kill(useless, how)
    began = time.monotonic()
    pid = fork_server.launch(**rank(server, TARGET))
    runs(server, pid)
    assert pid != useless
    assert time.monotonic() - began < 60
    fork_server.end_ranks()
    assert gone(useless)
    assert fork_server.launch(**rank(server, TARGET)) == standby(log, 2)


@pytest.mark.parametrize(("setting", "value"), [(ready_targets.FAILS, "1"), (ready_targets.SECONDS, "600")])
def test_a_standby_that_cannot_be_ready_is_done_without(
    server: HeartbeatServer, log: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv(setting, value)
    fork_server = ForkServer(TARGET, stands_by=True, settle=0.0)
    try:
        useless = standby(log, 1)
        pid = fork_server.launch(**rank(server, TARGET))
        runs(server, pid)
        assert pid != useless
    finally:
        fork_server.close()
    wait_for(lambda: gone(pid) and gone(useless))


def test_without_being_asked_for_there_is_none(server: HeartbeatServer, log: Path) -> None:
    fork_server = ForkServer(TARGET)
    try:
        runs(server, fork_server.launch(**rank(server, TARGET)))
        assert log.read_text() == ""
    finally:
        fork_server.close()


def test_a_standby_dies_with_who_started_it(server: HeartbeatServer, log: Path) -> None:
    code = (
        "import json, sys, time; from cluster.workers.fork_server import ForkServer\n"
        f"fork_server = ForkServer({TARGET!r}, True, 0.0); fork_server.launch(**json.loads(sys.argv[1]))\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code, json.dumps(rank(server, TARGET))], env=environment)
    wait_for(lambda: server.poll(0, 0.0).ranks[0].state == "running")
    pids = [standby(log, 1), server.poll(0, 0.0).ranks[0].pid]
    parent.kill()
    parent.wait()
    wait_for(lambda: all(gone(pid) for pid in pids))

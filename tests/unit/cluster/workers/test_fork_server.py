"""A process that forks ranks: quickly, again and again, and leaves none behind."""

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
from rank_requests import rank, wait_for

from cluster.workers.fork_server import ForkServer
from cluster.workers.gang import Cause
from cluster.workers.heartbeat import HeartbeatServer


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    found = ForkServer("targets:wait")
    yield found
    found.close()


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group of 64 MiB, of Linux's first kind or its second."""
    kinds = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
    made = next(filter(None, (small_group(Path(root), limit) for root, limit in kinds)), None)
    if made is None:
        pytest.skip("only root can make a control group of memory, where the kernel has them")
    yield made
    made.rmdir()


def small_group(root: Path, limit: str) -> Path | None:
    group = root / f"starves-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    if not (group / limit).exists():
        group.rmdir()
        return None
    (group / limit).write_text(str(64 * 2**20))
    return group


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_second_rank_starts_at_once_and_the_first_leaves_its_exit_code(
    fork_server: ForkServer, server: HeartbeatServer
) -> None:
    first = fork_server.launch(**rank(server))
    wait_for(lambda: server.poll(0, 0.0).ranks[0].state == "running")
    assert fork_server.exits() == {}
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: server.poll(0, 0.0).ranks[0].state == "dead")
    wait_for(lambda: fork_server.exits() == {first: -signal.SIGKILL})
    began = time.monotonic()
    second = fork_server.launch(**rank(server))
    wait_for(lambda: server.poll(0, 0.0).ranks[0].state == "running")
    assert (
        time.monotonic() - began < 5
    )  # an interpreter with its imports takes longer; a fork some milliseconds
    fork_server.end_ranks()
    assert gone(second)
    assert fork_server.exits() == {first: -signal.SIGKILL, second: -signal.SIGKILL}
    fork_server.launch(**rank(server))
    assert fork_server.exits() == {}


def test_a_frozen_rank_can_be_ended(fork_server: ForkServer, server: HeartbeatServer) -> None:
    pid = fork_server.launch(**rank(server))
    os.kill(pid, signal.SIGSTOP)
    fork_server.end_ranks()
    assert gone(pid)


def test_a_rank_that_fails_is_told_and_exits_with_one(
    fork_server: ForkServer, server: HeartbeatServer
) -> None:
    pid = fork_server.launch(**rank(server, "no_such_module:main"))
    wait_for(lambda: server.poll(0, 0.0).ranks[0].state == "failed")
    wait_for(lambda: fork_server.exits() == {pid: 1})


@pytest.mark.parametrize("how", ["objects", "descriptors"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_closed_its_output_tells_its_end_and_keeps_its_exit_code(
    fork_server: ForkServer, server: HeartbeatServer, how: str, fails: bool
) -> None:
    pid = fork_server.launch(**{**rank(server, "targets:mute"), "config": {"how": how, "fails": fails}})
    wait_for(lambda: fork_server.exits() == {pid: int(fails)})
    told = server.poll(0, 0.0).ranks[0]
    assert told.state == ("failed" if fails else "done")
    assert told.error.startswith("ValueError: nobody can print this") == fails


def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_told_from_one_that_somebody_kills(
    fork_server: ForkServer, server: HeartbeatServer, small_memory: Path
) -> None:
    starved = fork_server.launch(**{**rank(server, "targets:eat"), "config": {"group": str(small_memory)}})
    wait_for(lambda: fork_server.cause(starved))
    assert fork_server.cause(starved) == Cause("starved", -signal.SIGKILL)
    killed = fork_server.launch(**rank(server))
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: fork_server.cause(killed))
    assert fork_server.cause(killed) == Cause("exited", -signal.SIGKILL)


def test_ranks_die_with_their_fork_server(fork_server: ForkServer, server: HeartbeatServer) -> None:
    pid = fork_server.launch(**rank(server))
    fork_server.close()
    fork_server.close()
    wait_for(lambda: gone(pid))
    with pytest.raises(OSError):
        fork_server.launch(**rank(server))


def test_everything_dies_with_who_started_it(server: HeartbeatServer) -> None:
    code = (
        "import json, sys, time; from cluster.workers.fork_server import ForkServer\n"
        "fork_server = ForkServer('targets:wait'); rank = fork_server.launch(**json.loads(sys.argv[1]))\n"
        "print(fork_server._process.pid, rank, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(rank(server))], stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: all(gone(pid) for pid in pids))

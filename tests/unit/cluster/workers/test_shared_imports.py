"""Fork servers and calls that begin as copies of one process with the imports."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import shared_calls
from rank_requests import rank, wait_for

from cluster.workers.fork_server import ForkServer
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.shared_imports import CallInCopy, SharedImports, connect

TARGET = "targets:wait"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


@pytest.fixture
def imports() -> Iterator[SharedImports]:
    found = SharedImports(secrets.token_hex(8), TARGET)
    yield found
    found.close()


def listens(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(f"\0orchestrator-{name}") == 0


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_fork_server_begins_as_a_copy_which_has_folder_and_environment_of_who_asks(
    imports: SharedImports, server: HeartbeatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("HOME")
    connection, started = connect(imports.name, TARGET)
    assert started is None
    fork_server = ForkServer(TARGET, connection=connection)
    fork_server.launch(**rank(server, "shared_calls:place"))
    wait_for(lambda: server.poll(0, 0.0).ranks[0].state == "done")
    assert server.poll(0, 0.0).ranks[0].result == [str(tmp_path), "3", ""]
    fork_server.close()


def test_the_first_who_asks_starts_it_for_all(server: HeartbeatServer) -> None:
    name = secrets.token_hex(8)
    first, started = connect(name, TARGET)
    second, again = connect(name, TARGET)
    assert started is not None
    assert again is None
    with pytest.raises(OSError, match="in use"):
        SharedImports(name, TARGET)
    fork_servers = [ForkServer(TARGET, connection=connection) for connection in (first, second)]
    pid = fork_servers[0].launch(**rank(server))
    assert fork_servers[1].exits() == {}
    started.close()
    fork_servers[1].end_ranks()  # a copy needs it no longer
    assert running(pid)
    fork_servers[0].close()
    wait_for(lambda: not running(pid))


def test_a_call_returns_and_raises_what_the_function_does(imports: SharedImports) -> None:
    task = CallInCopy(imports.name, shared_calls.pid_and_module, "targets")
    pid, there = task.result()
    assert pid != os.getpid()
    assert there
    assert task.done()
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        CallInCopy(imports.name, os.listdir, "no-such-folder").result()
    with pytest.raises(ChildProcessError, match="_exit"):
        CallInCopy(imports.name, os._exit, 3).result()


def test_an_answer_that_cannot_be_read_is_a_failure(imports: SharedImports) -> None:
    """Which `result` raises; who only asks whether a task is done has no handler."""
    task = CallInCopy(imports.name, shared_calls.fail_oddly)
    while not task.done():
        time.sleep(0.01)
    with pytest.raises(TypeError, match="argument"):
        task.result()


def test_a_call_whose_copy_is_killed_is_made_once_more(imports: SharedImports, tmp_path: Path) -> None:
    """The kernel ends what takes too much memory, an export among it."""
    marks = tmp_path / "marks"
    marks.mkdir()
    task = CallInCopy(imports.name, shared_calls.die_once, str(marks))
    assert task.result() == 2
    again = CallInCopy(imports.name, shared_calls.die_once, str(tmp_path / "others"))
    while not again.done():
        time.sleep(0.01)
    assert again.result() == 2


def test_a_call_that_is_cancelled_cleans_up_and_is_gone(imports: SharedImports, tmp_path: Path) -> None:
    task = CallInCopy(imports.name, shared_calls.clean_up_late, str(tmp_path))
    wait_for((tmp_path / "begun").exists)
    assert not task.done()
    task.cancel()
    assert (tmp_path / "cleaned").exists()
    pid = int((tmp_path / "begun").read_text())
    wait_for(lambda: not running(pid))  # its end closes its sockets before its number is free
    task.cancel()


def test_a_call_ends_with_who_waits_for_it(imports: SharedImports, tmp_path: Path) -> None:
    code = (
        "import sys, shared_calls; from cluster.workers.shared_imports import CallInCopy\n"
        "CallInCopy(sys.argv[1], shared_calls.clean_up_late, sys.argv[2]).result()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", code, imports.name, str(tmp_path)], env=environment)
    wait_for((tmp_path / "begun").exists)
    process.kill()
    process.wait()
    wait_for((tmp_path / "cleaned").exists)


def test_it_ends_with_who_started_it() -> None:
    name = secrets.token_hex(8)
    code = (
        "import sys, time; from cluster.workers.shared_imports import SharedImports\n"
        f"SharedImports(sys.argv[1], {TARGET!r}); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", code, name], env=environment)
    wait_for(lambda: listens(name))
    process.kill()
    process.wait()
    wait_for(lambda: not listens(name))
    with pytest.raises(ConnectionRefusedError):
        CallInCopy(name, time.time)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_copy(imports: SharedImports) -> None:
    code = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); s.settimeout(20)\n"
        "s.connect('\\0orchestrator-' + sys.argv[1])\n"
        "try: print(s.recv(1))\n"
        "except ConnectionResetError: print(b'')\n"
    )
    asked = subprocess.run([sys.executable, "-c", code, imports.name], capture_output=True, text=True)
    assert asked.stdout == "b''\n"

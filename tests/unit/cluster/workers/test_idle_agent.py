from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cluster.workers import ray_internals

RAYLET = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]]).pid, flush=True)
sys.stdin.read()
"""


def test_it_says_that_nothing_is_served_and_ends_with_the_raylet(tmp_path: Path) -> None:
    raylet = subprocess.Popen(
        [sys.executable, "-c", RAYLET, ray_internals.__file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_NODE_ID": "abc"},
    )
    assert raylet.stdout is not None
    agent = int(raylet.stdout.readline())
    wanted = {f"{name}_abc": "-1" for name in ray_internals.PORTS}
    until = time.monotonic() + 30
    while {path.name: path.read_text() for path in tmp_path.iterdir()} != wanted:
        assert time.monotonic() < until
        time.sleep(0.02)
    process = psutil.Process(agent)
    assert process.is_running()
    raylet.communicate("")
    psutil.wait_procs([process], timeout=30)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_it_becomes_the_agent_of_environments_when_one_is_asked_for(tmp_path: Path) -> None:
    own = [
        "-c",
        "import sys; print(sys.argv[1:])",
        "--node-ip-address=127.0.0.1",
        "--runtime-env-agent-port=0",
    ]
    agent = subprocess.Popen(
        [sys.executable, "-I", "-S", ray_internals.__file__, str(tmp_path), sys.executable, *own],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_NODE_ID": "abc"},
    )
    until = time.monotonic() + 30
    while not (place := tmp_path / "runtime_env_agent_port_abc").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    port = int(place.read_text())
    assert agent.poll() is None
    with socket.create_connection(("127.0.0.1", port)):
        told = agent.communicate(timeout=30)[0]
    assert told == f"['--node-ip-address=127.0.0.1', '--runtime-env-agent-port={port}']\n"

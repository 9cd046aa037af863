"""Machines by ssh over a real network between namespaces, each with an address, a loopback and a server of its own.

They share this machine's files, as machines share the folder of a run.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import command, curve, job, orchestrator, rows, status, wait_for, write_job, write_text
from partition import Network, ip_of, network, unable
from ssh_servers import SSHD, Servers

from cluster.workers.device_limits import CPU

NAME, PORT, STEPS, SLOW = "t-ssh-net", 2222, 40, 0.2
LACKS = unable() or ("" if SSHD else "sshd is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKS), reason=LACKS)]


@pytest.fixture
def net(tmp_path: Path) -> Iterator[tuple[Network, Servers]]:
    """A machine to give commands on, and two with servers of ssh."""
    servers = Servers(tmp_path, PORT)
    with network() as found:
        for number in range(3):
            space = found.plug()
            if number:
                servers.start(ip_of(number), space.command())
        yield found, servers


def told(net: Network, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command on the first machine, to its end."""
    # This machine's name has no address in there, by which gloo alone would find the interface.
    there = net.spaces[0].command(*command(*words))
    return subprocess.run(there, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.timeout(900)
def test_a_run_over_two_machines_outlives_one_of_them(net: tuple[Network, Servers], tmp_path: Path) -> None:
    """No address is given but the hosts' own: the head's is the one that they see."""
    network, servers = net
    (tmp_path / "hosts").write_text("".join(f"{ip_of(n)} cpus=1 gpus=0\n" for n in (1, 2)))
    words = ("cluster", "up", "--hosts", "hosts", "--ssh", servers.ssh, "--name", NAME, "--json")
    done = told(network, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    cluster = json.loads(done.stdout)
    assert [host["ip"] for host in cluster["hosts"]] == [ip_of(1), ip_of(2)]
    address = cluster["environment"]["RAY_ADDRESS"]
    assert address.startswith(ip_of(0))

    document = job(write_text(tmp_path / "corpus"), steps=STEPS)
    slow = [word for attempt in (1, 2) for word in ("--fault", f"slow@0:1/{attempt}={SLOW}")]
    run = tmp_path / "runs" / "small"
    given = command("run", write_job(tmp_path, document), "--address", address, *slow)
    with open(tmp_path / "output.txt", "w") as output:
        driver = subprocess.Popen(network.spaces[0].command(*given), cwd=tmp_path, stderr=output, text=True)
    try:
        wait_for(lambda: status(run).get("step", 0) >= 6 or driver.poll() is not None, "step 6", 180)
        wait_for((run / "checkpoints/step-00000004/manifest.json").exists, "the commit at step 4")
        assert {rank["node"] for rank in status(run)["ranks"]} == {ip_of(1), ip_of(2)}
        at = network.cut(2)
        network.spaces[2].close()  # as one whose power is gone: nobody hears of it
        assert driver.wait(timeout=180) == 0, (tmp_path / "output.txt").read_text()
    finally:
        driver.kill()
        driver.wait()
    (stop,) = [event for event in rows(run, "events.jsonl") if event["first_fault"]]
    print(f"seen {stop['seen'] - at:.1f} s after the cut: {stop['first_fault']}")
    assert ip_of(2) in stop["first_fault"]
    longest = max(row["step_seconds"] for row in rows(run) if row["attempt"] == 1)
    assert stop["seen"] - at <= max(CPU.silence, 3 * longest) + 1.0
    assert rows(run)[-1]["layout"] == "dp1 zero0 mb8"

    began = time.monotonic()
    done = told(network, tmp_path, "cluster", "down", "--name", NAME)
    assert done.returncode == 0
    assert f"by itself because the head is gone: {ip_of(2)}: ssh: connect to host {ip_of(2)}" in done.stderr
    assert time.monotonic() - began < 60
    assert [p for p in network.spaces[1].processes() if "sshd" not in p.name()] == []
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(undisturbed(tmp_path))]


def undisturbed(folder: Path) -> Path:
    """The same job in one go on this machine: its run directory."""
    quiet = folder / "quiet"
    done = orchestrator("run", folder / "job.yaml", "--run-dir", quiet, cwd=folder)
    assert done.returncode == 0, done.stderr
    return quiet

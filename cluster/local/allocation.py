"""Run one Ray node of an allocation, as one task: `python -P -m cluster.local.allocation ADDRESS PORT CPUS GPUS
FOLDER`.

Slurm or SkyPilot gives the number of the task in the environment. Task 0 is the head, at that address. Each node, with
all of Ray, lives while the script that started it holds the other end of its standard input. SIGTERM does not end it:
at a preemption, Slurm sends SIGTERM to all tasks but not to the script, and the run on them still has to commit.
Instead, a file in the folder informs the script.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from cluster.local import node
from cluster.local.node import NodeSpec
from cluster.local.ports import free_port

PATIENCE = 120.0
"""Seconds until the head must be reachable."""
LEAVING = 20.0
"""Seconds for the node to end in order."""
LONGEST_FOLDER = 24
"""The maximum length of the folder of temporary files. A socket's path has 107 bytes, and Ray and this module need the
rest.
"""
PREEMPTED = "preempted"
"""The file in the folder that records that SIGTERM has come."""


def main() -> None:
    """Run the node of this task. Exit with a message if the head is not reachable in time."""
    address, port, cpus, gpus, notice_file = sys.argv[1:6]
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: _tell(Path(notice_file)))
    # Ray's processes would look for Python's own modules first in the working directory, which holds a job's files.
    os.environ["PYTHONSAFEPATH"] = "1"
    ended = threading.Event()
    number = int(os.environ.get("SKYPILOT_NODE_RANK") or os.environ.get("SLURM_PROCID", "0"))
    with tempfile.TemporaryDirectory(prefix="oa-", dir=short_folder(tempfile.gettempdir())) as folder:
        threading.Thread(target=_watch, args=[ended, folder], daemon=True).start()
        if number and not reached(address, int(port), PATIENCE, ended):
            sys.exit(
                f"{address}:{port}: no head has answered in {PATIENCE:.0f} s" if not ended.is_set() else 0
            )
        (Path(folder) / "nodes").mkdir()
        node.keep(
            spec_of(folder, address, port=int(port), cpus=float(cpus), gpus=float(gpus), number=number), ended
        )


def short_folder(folder: str) -> str:
    """Return the usual folder of temporary files, or /tmp if paths of sockets below the usual one would be too long.

    Some sites give each Slurm job its own folder.
    """
    return folder if len(folder) <= LONGEST_FOLDER else "/tmp"


def _tell(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the script has ended and removed its folder
        (folder / PREEMPTED).touch()


def _watch(ended: threading.Event, folder: str) -> None:
    """Wait for the end of the standard input.

    It reads the file descriptor, because a thread that reads sys.stdin would block the end of this process.
    """
    try:
        while os.read(0, 4096):
            pass
    finally:
        ended.set()
        time.sleep(LEAVING)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)  # for example while it waits for a head that is gone; the reaper ends Ray's processes


def spec_of(folder: str, address: str, port: int, cpus: float, gpus: float, number: int) -> NodeSpec:
    """Return the node of task `number` of an allocation."""
    if not number:
        dashboard = free_port("127.0.0.1")
        return NodeSpec(
            folder, address, port=port, dashboard=dashboard, cpus=cpus, gpus=gpus, owns_machine=True
        )
    own_address = _address(number)
    return NodeSpec(
        folder, own_address, head_address=f"{address}:{port}", cpus=cpus, gpus=gpus, owns_machine=True
    )


def _address(number: int) -> str:
    """Return the address at which other nodes reach the node of a task."""
    if "SKYPILOT_NODE_RANK" in os.environ:
        return os.environ["SKYPILOT_NODE_IPS"].split()[number]
    return socket.gethostbyname(os.environ.get("SLURMD_NODENAME") or socket.gethostname())


def reached(address: str, port: int, patience: float, ended: threading.Event) -> bool:
    """Return whether a process listens there within `patience` seconds and before `ended` is set."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not ended.is_set():
        try:
            socket.create_connection((address, port), timeout=2.0).close()
            return True
        except OSError:
            ended.wait(0.5)
    return False


if __name__ == "__main__":
    main()

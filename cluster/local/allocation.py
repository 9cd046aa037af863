"""A Ray node of an allocation, a task each: `python -P -m cluster.local.allocation ADDRESS PORT CPUS GPUS FOLDER`.

Which task it is, Slurm or SkyPilot has said in the environment. The node of task 0 is the head, at that address. Each
lives, with all of Ray, as long as the script that started it holds the other end of its standard input. SIGTERM does
not end it: at a preemption Slurm sends that to all tasks and not to the script, while the run on them has yet to
commit. It is told in the folder instead, where the script looks.
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
"""Seconds that the head may take to be reachable."""
LEAVING = 20.0
"""Seconds for the node to end in order."""
LONGEST_FOLDER = 24
"""Most characters of the folder of temporary files: of the 107 bytes of a socket's path Ray and this module need the
rest."""
PREEMPTED = "preempted"
"""The file of the folder that says that SIGTERM has come."""


def main() -> None:
    """Run the node of this task. Exits with a line if the head is not there in time."""
    address, port, cpus, gpus, told = sys.argv[1:6]
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: _tell(Path(told)))
    # What Ray starts here would look for Python's own modules in the working directory first, where a job's files are.
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


def short_folder(usual: str) -> str:
    """The usual folder of temporary files, or /tmp where paths of sockets below it would be too long: sites give each
    job of Slurm one of its own."""
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"


def _tell(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the script has ended, and has taken its folder along
        (folder / PREEMPTED).touch()


def _watch(ended: threading.Event, folder: str) -> None:
    """Wait for the end of the standard input. (Through its descriptor: a thread within `sys.stdin` would hinder the end
    of this process.)"""
    try:
        while os.read(0, 4096):
            pass
    finally:
        ended.set()
        time.sleep(LEAVING)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)  # it waits for a head that has gone, say; the reaper ends what there is of Ray


def spec_of(folder: str, address: str, port: int, cpus: float, gpus: float, number: int) -> NodeSpec:
    """The node of task `number` of an allocation."""
    if not number:
        dashboard = free_port("127.0.0.1")
        return NodeSpec(
            folder, address, port=port, dashboard=dashboard, cpus=cpus, gpus=gpus, owns_machine=True
        )
    own = _address(number)
    return NodeSpec(folder, own, head_address=f"{address}:{port}", cpus=cpus, gpus=gpus, owns_machine=True)


def _address(number: int) -> str:
    """Where the others reach the node of a task."""
    if "SKYPILOT_NODE_RANK" in os.environ:
        return os.environ["SKYPILOT_NODE_IPS"].split()[number]
    return socket.gethostbyname(os.environ.get("SLURMD_NODENAME") or socket.gethostname())


def reached(address: str, port: int, patience: float, ended: threading.Event) -> bool:
    """Whether something listens there within so many seconds, and before `ended`."""
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

"""One Ray node of an allocation: `python -m cluster.local.allocation ADDRESS PORT CPUS GPUS`, one task a node.

Which task it is, Slurm or SkyPilot has said in the environment. The node of task 0 is the head, at that address. Each
ends on SIGTERM, with all of Ray.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from cluster.local import node
from cluster.local.node import NodeSpec

PATIENCE = 120.0
"""Seconds that the head may take to be reachable."""


def main() -> None:
    """Run the node of this task. Exits with a line if the head is not there in time."""
    address, port, cpus, gpus = sys.argv[1:5]
    number = int(os.environ.get("SKYPILOT_NODE_RANK") or os.environ.get("SLURM_PROCID", "0"))
    if number and not reached(address, int(port), PATIENCE):
        sys.exit(f"{address}:{port}: no head has answered in {PATIENCE:.0f} s")
    # Sockets have short paths only, and are of one machine.
    with tempfile.TemporaryDirectory(prefix="oa-") as folder:
        (Path(folder) / "nodes").mkdir()
        spec = spec_of(folder, address, int(port), float(cpus), float(gpus), number)
        sys.argv = [sys.argv[0], json.dumps(spec.to_json())]
        node.main()


def spec_of(folder: str, address: str, port: int, cpus: float, gpus: float, number: int) -> NodeSpec:
    """The node of task `number` of an allocation."""
    if not number:
        return NodeSpec(
            folder, address, port=port, dashboard=free_port(), cpus=cpus, gpus=gpus, owns_machine=True
        )
    own = _address(number)
    return NodeSpec(folder, own, head_address=f"{address}:{port}", cpus=cpus, gpus=gpus, owns_machine=True)


def _address(number: int) -> str:
    """Where the others reach the node of a task."""
    if "SKYPILOT_NODE_RANK" in os.environ:
        return os.environ["SKYPILOT_NODE_IPS"].split()[number]
    return socket.gethostbyname(os.environ.get("SLURMD_NODENAME") or socket.gethostname())


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reached(address: str, port: int, patience: float) -> bool:
    """Whether something listens there within so many seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=2.0).close()
            return True
        except OSError:
            time.sleep(0.5)
    return False


if __name__ == "__main__":
    main()

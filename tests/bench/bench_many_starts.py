"""How long many ranks take to start: here on several Ray nodes, and by torchrun, in turns.

    python tests/bench/bench_many_starts.py [--ranks 512] [--nodes 8] [--rounds 1]

The Ray nodes are processes of this machine and are up, as is the process with the imports of ranks. The ranks are
forked from the imports of a real rank, and do nothing. `first` is the seconds until all ranks are heard of where no
worker is ready, `next` those of the next attempt. torchrun starts as many processes, each of which imports nothing and
connects to this one; its seconds begin with the command. Memory is what the machine uses more while all ranks are up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import paths  # noqa: F401
import psutil
import ray
from ray.cluster_utils import Cluster

from cluster.workers.gang import Bundle
from cluster.workers.ray_gang import RayGang
from cluster.workers.ray_internals import lean_start
from cluster.workers.shared_imports import SharedImports

TARGET = "waiting_rank:wait"
LIMIT = 300.0
"""Seconds after which an attempt is given up."""
PEER = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"


def used() -> float:
    """Return the memory that the machine uses, in MB."""
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / 1e6


def by_torchrun(ranks: int) -> tuple[float, float]:
    """Return the seconds until all ranks of torchrun have connected, and the memory of all its processes in MB."""
    before = used()
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0), backlog=ranks) as server,
    ):
        script = Path(folder) / "rank.py"
        script.write_text(PEER)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, str(script), str(server.getsockname()[1])],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        server.settimeout(LIMIT)
        connections = [server.accept()[0] for _ in range(ranks)]
        seconds = time.monotonic() - began
        memory = used() - before
        for connection in connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return seconds, memory


def attempt(gang: RayGang, ranks: int) -> float:
    """Return the seconds from the start of an attempt until all its ranks are heard of."""
    began = time.monotonic()
    gang.start(ranks, Bundle(cpu=1), TARGET, {})
    while any(rank.state != "running" for rank in gang.poll(0, 0.01).ranks):
        if time.monotonic() > began + LIMIT:
            raise TimeoutError(f"the ranks were not up after {LIMIT:.0f} s")
    return time.monotonic() - began


def here(shared: str, ranks: int) -> tuple[float, float, float, int]:
    """Return the seconds of the first and of the next attempt, the memory in MB, and how many actors there are."""
    before = used()
    with contextlib.closing(RayGang(shared)) as gang:
        first = attempt(gang, ranks)
        memory = used() - before
        gang.stop()
        again = attempt(gang, ranks)
        actors = len({host for group, _ in gang._slots for host in group.hosts})
        gang.stop()
    time.sleep(5.0)  # Ray's processes are gone then
    return first, again, memory, actors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    shared, folder = f"bench-{uuid.uuid4().hex}", Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parents[1])])
    os.environ["PYTHONPATH"] = path
    with contextlib.closing(SharedImports(shared, TARGET)), lean_start():
        cluster = Cluster()
        try:
            for number in range(asked.nodes + 1):  # the first is the head, without ranks
                cluster.add_node(
                    num_cpus=asked.ranks // asked.nodes * min(number, 1),
                    node_ip_address=f"127.0.0.{10 + number}",
                    object_store_memory=100 * 2**20,
                    include_dashboard=False,
                    dashboard_agent_listen_port=0,
                )
            cluster.wait_for_nodes(timeout=120)
            ray.init(
                address=cluster.address,
                logging_level="warning",
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )
            here(shared, 1)  # the imports of ranks are done then
            for _ in range(asked.rounds):
                first, again, memory, actors = here(shared, asked.ranks)
                print(
                    f"{asked.ranks} ranks on {asked.nodes} Ray nodes, {actors} actors: first {first:.1f} s, "
                    f"next {again:.1f} s, {memory / asked.ranks:.1f} MB a rank",
                    flush=True,
                )
                seconds, memory = by_torchrun(asked.ranks)
                print(
                    f"{asked.ranks} ranks by torchrun: {seconds:.1f} s, {memory / asked.ranks:.1f} MB a rank",
                    flush=True,
                )
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()

"""Real Ray nodes on this machine: a head without processors, and workers of one processor each."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import job, orchestrator, write_job, write_text
from ray.cluster_utils import Cluster

from cluster.workers.ray_internals import lean_start

HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
"""A dead node, which refuses to be asked, is noticed in two seconds instead of the default's twenty; one that is slow
to answer on a busy machine is not taken for dead."""


def add_node(cluster: Cluster, number: int) -> None:
    """A node at 127.0.0.10 and so on: number 0 is the head."""
    cluster.add_node(
        num_cpus=min(number, 1),
        node_ip_address=f"127.0.0.{10 + number}",
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        dashboard_agent_listen_port=0,
        **({"_system_config": HEALTH} if number == 0 else {}),
    )


@contextlib.contextmanager
def three_nodes() -> Iterator[Cluster]:
    """A head at 127.0.0.10 and two workers at .11 and .12; all processes are gone afterwards."""
    found = Cluster()
    try:
        for number in range(3):
            add_node(found, number)
        found.wait_for_nodes(timeout=60)
        yield found
    finally:
        found.shutdown()


@pytest.fixture(scope="session")
def lasting_cluster() -> Iterator[tuple[Cluster, Iterator[int]]]:
    """One for all tests of a process, and numbers that no node of it has had."""
    with contextlib.ExitStack() as stack:
        with lean_start():
            found = stack.enter_context(three_nodes())
        yield found, itertools.count(3)


@pytest.fixture
def cluster(lasting_cluster: tuple[Cluster, Iterator[int]]) -> Cluster:
    """A head and two workers. What the tests before have removed is replaced, and what they have added is removed."""
    found, numbers = lasting_cluster
    alive = [node for node in found.worker_nodes if node.remaining_processes_alive()]
    for node in found.worker_nodes - {*alive[:2]}:
        found.remove_node(node)
    with lean_start():
        for number in itertools.islice(numbers, 2 - len(found.worker_nodes)):
            add_node(found, number)
    found.wait_for_nodes(timeout=60)
    return found


@pytest.fixture
def new_node(lasting_cluster: tuple[Cluster, Iterator[int]]) -> Callable[[], None]:
    """Adds a node of a processor to `cluster`."""
    found, numbers = lasting_cluster
    return lambda: add_node(found, next(numbers))


@pytest.fixture
def exporting_cluster() -> Iterator[Cluster]:
    """Three nodes with the agents that export metrics."""
    with three_nodes() as found:
        yield found


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """A run that nothing disturbs, one for all test processes: its folder, its run directory, and what the command
    said."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "quiet"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done.json").exists():
            document = job(write_text(folder / "corpus"))
            document["checkpoint"]["export"] = "hf"
            document["checkpoint"]["keep"] = 9
            document["tracking"] = {"uri": "sqlite:///mlflow.db", "experiment": "tests"}
            path, began = write_job(folder, document), time.monotonic()
            done = orchestrator("run", path, "--json", cwd=folder)
            (folder / "seconds.txt").write_text(f"{time.monotonic() - began:.2f}")
            (folder / "done.json").write_text(json.dumps(vars(done)))
        found = json.loads((folder / "done.json").read_text())
    return folder, folder / "runs" / "small", subprocess.CompletedProcess(**found)

"""Real Ray nodes on this machine: a head without processors, and workers of one processor each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import job, orchestrator, write_job, write_text
from ray.cluster_utils import Cluster

HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
"""A dead node is noticed in some seconds instead of the default's twenty, so that tests are short."""


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


@pytest.fixture(scope="module")
def breakable_cluster() -> Iterator[Cluster]:
    with three_nodes() as found:
        yield found


@pytest.fixture
def cluster(breakable_cluster: Cluster) -> Cluster:
    """Three nodes for a test that may remove some; those that the test before it has removed are replaced."""
    for number in range(3, 5 - len(breakable_cluster.worker_nodes)):
        add_node(breakable_cluster, number)
    breakable_cluster.wait_for_nodes(timeout=60)
    return breakable_cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """Three nodes for the tests that break none."""
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

"""The head node dies and comes back with what Ray stored on its disk: the run goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from jobs import curve, job, orchestrator, rows, started, status, wait_for, weights, write_job, write_text
from ray.cluster_utils import Cluster

HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}


@dataclass
class LastingHead:
    """A head at 127.0.0.10 whose control store is on disk (Ray's embedded RocksDB), so that it may come back."""

    cluster: Cluster
    storage: Path
    port: int

    @property
    def raylet(self) -> int:
        """The process that the head's actors are children of."""
        return int(self.cluster.head_node.all_processes["raylet"][0].process.pid)

    def start(self) -> None:
        """At the same port and with what was stored."""
        stored = {"gcs_storage": "rocksdb", "gcs_storage_path": str(self.storage)}
        self.cluster.add_node(
            num_cpus=0,
            node_ip_address="127.0.0.10",
            gcs_server_port=self.port,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            _system_config={**HEALTH, **stored},
        )

    def kill(self) -> None:
        """SIGKILL of all that runs on the head but the processes of actors, which see their raylet gone."""
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        self.cluster.head_node = None

    def add_workers(self) -> None:
        """Two nodes of one processor each."""
        for number in (1, 2):
            self.cluster.add_node(
                num_cpus=1, node_ip_address=f"127.0.0.{10 + number}", object_store_memory=100 * 2**20
            )


@pytest.fixture
def lasting_head(tmp_path: Path) -> Iterator[LastingHead]:
    """A head alone; all processes are gone afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.10", 0))
        port = probe.getsockname()[1]
    storage = tmp_path / "gcs"
    storage.mkdir()
    found = LastingHead(Cluster(), storage, port)
    try:
        found.start()
        yield found
    finally:
        found.cluster.shutdown()


@pytest.mark.slow
def test_the_head_may_die_and_come_back(lasting_head: LastingHead, tmp_path: Path) -> None:
    """The controller dies with it. Ray's control store, on disk, knows of the actor and starts it again.

    A head without processors holds the controller for certain while there is no other node.

    Asked for in kuberay#2153, kuberay#2155, kuberay#4920 and monarch#2684.
    """
    document = job(write_text(tmp_path / "corpus"))
    document["resources"]["workers"]["min"] = 2
    path, run = write_job(tmp_path, document), tmp_path / "runs" / "small"
    words = ["run", path, "--address", lasting_head.cluster.address]
    with started(*words, "--fault", "slow@0:1=1.5", cwd=tmp_path) as driver:
        pid = wait_for(lambda: status(run).get("pid"), "the controller on the head")
        lasting_head.add_workers()
        wait_for(lambda: status(run).get("step", 0) >= 5, "step 5")
        assert psutil.Process(pid).ppid() == lasting_head.raylet
        lasting_head.kill()
        wait_for(lambda: not psutil.pid_exists(pid), "the controller to die with its node")
        lasting_head.start()
        wait_for(lambda: status(run).get("pid") not in (pid, None), "another controller")
        driver.wait(timeout=200)
    done = orchestrator(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    begun = [event["reason"] for event in rows(run, "events.jsonl") if "last_seen" in event]
    assert [reason.partition(":")[0] for reason in begun] == ["begun", "resumed"]
    assert rows(run)[-1]["attempt"] == 2
    quiet = tmp_path / "quiet"
    assert orchestrator("run", path, "--run-dir", quiet, cwd=tmp_path).returncode == 0
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)

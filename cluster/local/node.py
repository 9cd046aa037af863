"""The process of one Ray node: `python -m cluster.local.node '<JSON>'`. It ends on SIGTERM, with all of Ray.

Even after SIGKILL the whole node ends: the kernel ends Ray's processes with this one, and a reaper ends their children.
Tests lose nodes this way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster.local.reaped import reaped
from cluster.workers.ray_internals import RayNode

STORE_BYTES = 80 * 2**20
"""Bytes of shared memory for a node's objects; Ray's minimum is 75 MiB."""
SETTINGS = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
"""Ray's system configuration if all nodes are on one machine. A dead node is detected in seconds instead of twenty."""
COMMON = {
    "enable_metrics_collection": False,
    "raylet_client_connect_timeout_milliseconds": 50,
    "raylet_client_num_connect_attempts": 200,
}
"""Ray's system configuration for every start. Ray would serve metrics on every interface without a token. A process
that waits for a node's socket retries soon, for as long as by default. Ray's own interval of a second delayed one start
in seven by that second."""
LONG_PATH = "AF_UNIX path length"
"""Part of Ray's error message if the path of its folder is too long for a socket."""
TOO_SLOW = "timed out during startup"
"""Part of Ray's error message if a raylet has ended, or does not register in time."""
WHEN_IDLE = "try again when this machine has less to do"
"""The hint for a node that started too slowly."""
NO_PORT = {"DASHBOARD_METRIC_PORT": "-1", "AUTOSCALER_METRIC_PORT": "-1"}
"""Variables that keep the metrics servers of the dashboard and the autoscaler from starting."""


@dataclass(frozen=True)
class NodeSpec:
    """A node, with the resources that it declares to Ray."""

    folder: str
    """The folder of its cluster."""
    ip: str
    head_address: str = ""
    """The address of the head; empty for a head."""
    port: int = 0
    """The port of a head."""
    dashboard: int = 0
    """The port of a head's dashboard and Jobs API."""
    cpus: float = 1
    gpus: float = 0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    autoscaling: str = ""
    """The configuration file of the autoscaler that runs beside a head; empty for none."""
    instance: str = ""
    """The instance id by which the autoscaler knows the node."""
    kind: str = ""
    """The node type by which the autoscaler knows the node."""
    owns_machine: bool = False
    """Whether the node has its machine to itself, so that Ray's own sizes and timeouts apply."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for the node's command line and record."""
        return dataclasses.asdict(self)

    @property
    def short_name(self) -> str:
        """Return a name that is unique in the folder: 7 at 127.0.26.7. It is short, because paths of sockets contain
        it.
        """
        _, block, _, number = self.ip.split(".")
        return number if self.owns_machine else str(int(block) * 256 + int(number))

    @property
    def record(self) -> Path:
        """Return the file that the node writes once it runs."""
        return Path(self.folder) / "nodes" / f"{self.ip}.json"


def main() -> None:
    """Run the node of the command line until SIGTERM."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    keep(NodeSpec(**json.loads(sys.argv[1])), ended)


def keep(spec: NodeSpec, ended: threading.Event) -> None:
    """Start the node, write its record, and run it until `ended` is set or one of its main processes has ended."""
    os.environ |= NO_PORT
    if spec.instance:
        os.environ |= {"RAY_CLOUD_INSTANCE_ID": spec.instance, "RAY_NODE_TYPE_NAME": spec.kind}
    with reaped():  # Ray's agents would live on for minutes after a SIGKILL
        node = _start(spec)
        try:
            _write_record(spec, node.address)
            while not ended.wait(0.5) and not node.is_broken():
                pass
        finally:
            node.stop()


def _write_record(spec: NodeSpec, address: str) -> None:
    me = psutil.Process()
    record = {**spec.to_json(), "pid": me.pid, "born": me.create_time(), "address": address}
    draft = spec.record.with_suffix(f".{me.pid}")
    draft.write_text(json.dumps(record))
    draft.replace(spec.record)


def _start(spec: NodeSpec) -> RayNode:
    head = not spec.head_address
    store, settings = (None, COMMON) if spec.owns_machine else (STORE_BYTES, COMMON | SETTINGS)
    options: dict[str, Any] = {"node_ip_address": spec.ip, "object_store_memory": store}
    options |= {"num_cpus": spec.cpus, "num_gpus": spec.gpus, "resources": dict(spec.resources)}
    options |= {"labels": dict(spec.labels), "min_worker_port": 0, "max_worker_port": 0}
    options |= {"node_manager_port": 0, "dashboard_agent_listen_port": 0, "include_log_monitor": head}
    # Each node has its own folder, because nodes that start at once would use the same names for their sockets.
    options |= {"temp_dir": os.path.join(spec.folder, spec.short_name)}
    if head:
        options |= {"gcs_server_port": spec.port, "include_dashboard": True}
        options |= {
            "dashboard_host": "127.0.0.1",
            "dashboard_port": spec.dashboard,
            "_system_config": settings,
        }
        options |= {"autoscaling_config": spec.autoscaling or None, "no_monitor": not spec.autoscaling}
    else:
        options |= {"gcs_address": spec.head_address}
    return RayNode(head, options)


if __name__ == "__main__":
    main()

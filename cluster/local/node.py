"""One Ray node in a process of its own: `python -m cluster.local.node '<JSON>'`.

It ends on SIGTERM, and all of Ray with it.

Even SIGKILL takes the whole node along, since the kernel ends Ray's processes with this one: that is how a node
is lost in tests.
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

STORE_BYTES = 80 * 2**20
"""Of shared memory for a node's objects; Ray's least is 75 MiB."""
ALIVE_TIMEOUT = 60
"""Seconds for a started node to be known to its head."""
SETTINGS = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
    "enable_metrics_collection": False,
}
"""A dead node is noticed in some seconds instead of the default's twenty, since all of them are on one machine. Ray
would serve metrics on every interface and without a token, so there are none."""
NO_PORT = {"DASHBOARD_METRIC_PORT": "-1", "AUTOSCALER_METRIC_PORT": "-1"}
"""Keeps the metrics servers of dashboard and autoscaler from starting; they have no other switch."""


@dataclass(frozen=True)
class NodeSpec:
    """A node at a loopback address, with as many processors and other resources as it is said to have.

    A head has no `head_address` to join, and `dashboard` is the port of its dashboard and Jobs API. With
    `autoscaling`, the path of a configuration file, Ray's autoscaler runs beside the head. `instance` and `kind`
    are what an autoscaler knows the node by.
    """

    folder: str
    ip: str
    head_address: str = ""
    port: int = 0
    dashboard: int = 0
    cpus: float = 1
    gpus: float = 0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    autoscaling: str = ""
    instance: str = ""
    kind: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @property
    def record(self) -> Path:
        """The file that tells of the node once it is up."""
        return Path(self.folder) / "nodes" / f"{self.ip}.json"


def main() -> None:
    """Start the node, tell of it, and keep it until SIGTERM or until one of its main processes has ended."""
    spec = NodeSpec(**json.loads(sys.argv[1]))
    os.environ |= NO_PORT
    if spec.instance:
        os.environ |= {"RAY_CLOUD_INSTANCE_ID": spec.instance, "RAY_NODE_TYPE_NAME": spec.kind}
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    node = _start(spec)
    try:
        me = psutil.Process()
        told = {**spec.to_json(), "pid": me.pid, "born": me.create_time(), "address": node.gcs_address}
        draft = spec.record.with_suffix(f".{me.pid}")
        draft.write_text(json.dumps(told))
        draft.replace(spec.record)
        while not ended.wait(0.5) and not _is_broken(node):
            pass
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


def _start(spec: NodeSpec) -> Any:
    """Ray's own processes of the node. (`ray start` would open a port for Ray Client too.)"""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.utils import write_ray_address

    head = not spec.head_address
    options: dict[str, Any] = {"node_ip_address": spec.ip, "object_store_memory": STORE_BYTES}
    options |= {"num_cpus": spec.cpus, "num_gpus": spec.gpus, "resources": dict(spec.resources)}
    options |= {"labels": dict(spec.labels), "min_worker_port": 0, "max_worker_port": 0}
    options |= {"node_manager_port": 0, "dashboard_agent_listen_port": 0, "include_log_monitor": head}
    # A folder of its own: nodes that start at once would take the same names for their sockets.
    options |= {"temp_dir": os.path.join(spec.folder, spec.ip.rsplit(".", 1)[1])}
    if head:
        options |= {"gcs_server_port": spec.port, "include_dashboard": True}
        options |= {
            "dashboard_host": "127.0.0.1",
            "dashboard_port": spec.dashboard,
            "_system_config": SETTINGS,
        }
        options |= {"autoscaling_config": spec.autoscaling or None, "no_monitor": not spec.autoscaling}
    else:
        options |= {"gcs_address": spec.head_address}
    node = Node(RayParams(**options), head=head, shutdown_at_exit=False, spawn_reaper=True)
    services.wait_for_node(node.gcs_address, node.plasma_store_socket_name, ALIVE_TIMEOUT)
    # Where jobs look for their cluster; without it they would take any head that runs on this machine.
    write_ray_address(node.gcs_address, options["temp_dir"])
    return node


def _is_broken(node: Any) -> bool:
    """Whether the node's raylet, or its head's state, is gone: then it is no node any more."""
    return any(kind in ("raylet", "gcs_server") for kind, _ in node.dead_processes())


if __name__ == "__main__":
    main()

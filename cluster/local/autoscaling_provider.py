"""A node provider for Ray's autoscaler (v2, provider type `external`) that starts real nodes on this machine.

It starts and ends nodes as a cloud would, so that elastic training can be tested without a cloud. A node whose process
has ended, for any reason, counts as reclaimed by the cloud.
"""

from __future__ import annotations

import dataclasses
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import yaml
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from cluster.local import local_cluster, node_processes
from cluster.local.node import NodeSpec

HEAD = "head"


class LocalNodeProvider(NodeProvider):
    """Ray's `NodeProvider` for a local cluster. Node ids are addresses. The autoscaler calls it
    from several threads.
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._cluster = local_cluster.LocalCluster(cluster_name, **provider_config["cluster"])
        self._lock = threading.Lock()
        self._tags: dict[str, dict[str, str]] = {
            HEAD: {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: HEAD,
                TAG_RAY_NODE_NAME: HEAD,
                TAG_RAY_NODE_STATUS: "up-to-date",
            }
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Return the head, and the nodes whose process runs."""
        with self._lock:
            for ip in [ip for ip, process in self._processes.items() if process.poll() is not None]:
                del self._processes[ip], self._tags[ip]
            return [ip for ip, tags in self._tags.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        """Return whether the node is up."""
        return node_id == HEAD or NodeSpec(self._cluster.folder, node_id).record.exists()

    def is_terminated(self, node_id: str) -> bool:
        """Return whether the node is gone."""
        return node_id not in self.non_terminated_nodes({})

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Return the tags that the autoscaler has set on the node."""
        with self._lock:
            return dict(self._tags.get(node_id, {}))

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Set tags of the node."""
        with self._lock:
            self._tags.setdefault(node_id, {}).update(tags)

    def external_ip(self, node_id: str) -> str:
        """Return the node's address, which is also its id."""
        return node_id

    internal_ip = external_ip

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        """Start `count` nodes with these resources and labels."""
        others = {key: value for key, value in resources.items() if key not in ("CPU", "GPU", "memory")}
        spec = NodeSpec(
            folder="",
            ip="",
            cpus=resources.get("CPU", 0),
            gpus=resources.get("GPU", 0),
            resources=others,
            labels=labels,
            kind=tags[TAG_RAY_USER_NODE_TYPE],
        )
        for node in local_cluster.with_addresses(self._cluster, [spec] * count):
            process = node_processes.launch_node(dataclasses.replace(node, instance=node.ip))
            with self._lock:
                self._processes[node.ip], self._tags[node.ip] = process, dict(tags)

    def terminate_node(self, node_id: str) -> None:
        """End the node and everything that runs on it."""
        with self._lock:
            process = self._processes.pop(node_id, None)
            self._tags.pop(node_id, None)
        if process is not None:
            node_processes.end_nodes([{"folder": self._cluster.folder, "ip": node_id, **_born(process)}])


def autoscaling_config(nodes: Sequence[NodeSpec], min_nodes: int, max_nodes: int, idle: float) -> str:
    """Return Ray's autoscaling configuration (YAML) with `min_nodes` to `max_nodes` nodes of each of these types.

    A node that is idle for `idle` seconds ends. `local_cluster.up` fills in {folder}, {address} and {network}.
    """
    cluster = {"folder": "{folder}", "address": "{address}", "dashboard": "", "network": "{network}"}
    kinds: dict[str, Any] = {HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}}
    for number, node in enumerate(nodes, start=1):
        kinds[f"worker-{number}"] = {
            "resources": {"CPU": node.cpus, **({"GPU": node.gpus} if node.gpus else {}), **node.resources},
            "labels": node.labels,
            "node_config": {},
            "min_workers": min_nodes,
            "max_workers": max_nodes,
        }
    # Ray's launcher has nothing to install on a machine.
    launcher: dict[str, Any] = {"auth": {}, "file_mounts": {}, "initialization_commands": []}
    launcher |= {"cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": []}
    launcher |= {"rsync_filter": [], "docker": {}}
    for key in ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"):
        launcher[f"{key}_commands"] = []
    provider = {
        "type": "external",
        "module": "cluster.local.autoscaling_provider.LocalNodeProvider",
        "cluster": cluster,
    }
    return yaml.safe_dump(
        {
            **launcher,
            "cluster_name": "local",
            "max_workers": max_nodes * len(nodes),
            "idle_timeout_minutes": idle / 60,
            "provider": {**provider, "disable_node_updaters": True, "disable_launch_config_check": True},
            "available_node_types": kinds,
            "head_node_type": HEAD,
        },
        sort_keys=False,
    )


def _born(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    import psutil

    try:
        return {"pid": process.pid, "born": psutil.Process(process.pid).create_time()}
    except psutil.Error:
        return {"pid": process.pid, "born": 0.0}

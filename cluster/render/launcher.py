"""YAML for Ray's cluster launcher (`ray up`): an on-demand head, workers that may be spot machines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.render.needs import ClusterNeeds, NodeGroup
from cluster.workers.machine import MACHINE_TYPE

Document = dict[str, Any]

TOKEN = "~/.ray/auth_token"
"""Where Ray looks for the token by itself, here and on the nodes; `ray get-auth-token --generate` makes it."""
HEAD = "head"
DISK_GIB = 200


@dataclass(frozen=True)
class CloudRegion:
    """Where in a cloud: region, zones (comma-separated), the machine types of head and workers, the project (GCP)
    or resource group (Azure), the instance profile that may reach the bucket (AWS)."""

    region: str
    zones: str
    head_machine: str
    worker_machine: str
    project: str = ""
    profile: str = ""


PLACES = {
    "aws": CloudRegion("us-west-2", "us-west-2a,us-west-2b", "m6i.xlarge", "m6i.2xlarge"),
    "gcp": CloudRegion("us-west1", "us-west1-a", "n2-standard-4", "n2-standard-8"),
    "azure": CloudRegion("westus2", "auto", "Standard_D4s_v5", "Standard_D8s_v5", project="ray-cluster"),
}
"""Places to start from; a GPU job needs a worker machine with GPUs."""


def cloud(kind: str, needs: ClusterNeeds, place: CloudRegion) -> Document:
    """A cluster on `aws`, `gcp` or `azure`."""
    node = NODES[kind]
    types: Document = {
        HEAD: {
            "resources": {"CPU": 0},  # nothing trains on the node that must not be lost
            "node_config": node(place, place.head_machine, False),
            "min_workers": 0,
            "max_workers": 0,
        }
    }
    for group in needs.groups():
        types[group.name] = _node_type(group, node(place, place.worker_machine, group.spot))
        types[group.name]["labels"][MACHINE_TYPE] = place.worker_machine
    return {
        "cluster_name": needs.name,
        "max_workers": max(group.max for group in needs.groups()),
        "idle_timeout_minutes": 5,
        "provider": _provider(kind, place),
        "auth": {"ssh_user": "ubuntu"},
        "available_node_types": types,
        "head_node_type": HEAD,
        **_software(needs),
    }


def local(needs: ClusterNeeds, head_ip: str, worker_ips: tuple[str, ...], ssh_user: str) -> Document:
    """A cluster on machines that are there already, reached by SSH."""
    return {
        "cluster_name": needs.name,
        "provider": {"type": "local", "head_ip": head_ip, "worker_ips": list(worker_ips)},
        "auth": {"ssh_user": ssh_user},
        **_software(needs),
    }


def _node_type(group: NodeGroup, node_config: Document) -> Document:
    resources = {"CPU": math.ceil(group.cpu), "memory": int(group.memory_gib * 2**30)}
    if group.gpu:
        resources["GPU"] = group.gpu
    return {
        "resources": resources,
        "labels": group.labels,
        "node_config": node_config,
        "min_workers": group.min,
        "max_workers": group.max,
    }


def _provider(kind: str, place: CloudRegion) -> Document:
    if kind == "aws":
        zones = {"availability_zone": place.zones, "cache_stopped_nodes": False}
        return {"type": kind, "region": place.region, **zones}
    if kind == "gcp":
        zone = place.zones.split(",")[0]
        return {"type": kind, "region": place.region, "availability_zone": zone, "project_id": place.project}
    where = {"location": place.region, "resource_group": place.project}
    return {"type": kind, **where, "availability_zone": place.zones, "cache_stopped_nodes": False}


def _aws(place: CloudRegion, machine: str, spot: bool) -> Document:
    disk = {
        "DeviceName": "/dev/sda1",
        "Ebs": {"VolumeSize": DISK_GIB, "VolumeType": "gp3", "Encrypted": True},
    }
    node: Document = {
        "InstanceType": machine,
        "BlockDeviceMappings": [disk],
        "MetadataOptions": {"HttpTokens": "required"},
    }
    if place.profile:
        node["IamInstanceProfile"] = {"Name": place.profile}
    if spot:
        node["InstanceMarketOptions"] = {"MarketType": "spot"}
    return node


def _gcp(place: CloudRegion, machine: str, spot: bool) -> Document:
    image = "projects/deeplearning-platform-release/global/images/family/common-cpu"
    disk = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {"diskSizeGb": DISK_GIB, "sourceImage": image},
    }
    node: Document = {"machineType": machine, "disks": [disk]}
    if spot:
        node["scheduling"] = [{"preemptible": True}]
    return node


def _azure(place: CloudRegion, machine: str, spot: bool) -> Document:
    parameters: Document = {
        "vmSize": machine,
        "imagePublisher": "microsoft-dsvm",
        "imageOffer": "ubuntu-2204",
        "imageSku": "2204-gen2",
        "imageVersion": "latest",
    }
    if spot:
        parameters |= {"priority": "Spot", "billingProfile": {"maxPrice": -1}}
    return {"azure_arm_parameters": parameters}


NODES: dict[str, Callable[[CloudRegion, str, bool], Document]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}


def _software(needs: ClusterNeeds) -> Document:
    """The image on every node, and Ray started with the token, its dashboard on loopback (`ray dashboard`)."""
    start = "ulimit -n 65536; RAY_AUTH_MODE=token ray start"
    shared = "--object-manager-port=8076"
    options = ["--ulimit nofile=65536:65536", "--env RAY_AUTH_MODE=token", "--shm-size=8g"]
    if needs.gpu:
        options.append("--gpus all")
    return {
        "docker": {
            "image": needs.image,
            "container_name": "orchestrator",
            "pull_before_run": True,
            "run_options": options,
        },
        "file_mounts": {TOKEN: TOKEN},
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [
            "RAY_AUTH_MODE=token ray stop",
            f"{start} --head --port=6379 {shared} --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            "RAY_AUTH_MODE=token ray stop",
            f"{start} --address=$RAY_HEAD_IP:6379 {shared}",
        ],
    }

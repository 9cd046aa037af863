"""Make configurations of Ray's cluster launcher (`ray up`): an on-demand head, and workers on demand or spot."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.workers.machine import MACHINE_TYPE
from orchestrator.extensions.render.cluster_needs import ClusterNeeds, NodeGroup

Document = dict[str, Any]

TOKEN = "~/.ray/auth_token"
"""The file in which Ray looks for the token, here and on the nodes. `ray get-auth-token --generate` makes it."""
HEAD = "head"
DISK_GIB = 200
GCP_IMAGES = "projects/deeplearning-platform-release/global/images/family/"
GCP_IMAGE, GCP_GPU_IMAGE = "common-cpu", "common-cu129-ubuntu-2404-nvidia-580"
"""Families of Google's images with Docker. The second also has NVIDIA's driver and container runtime."""


@dataclass(frozen=True)
class CloudRegion:
    """A place in a cloud: region, zones (comma-separated), machine types of head and workers, and cloud specifics.

    These are the project (GCP) or the resource group (Azure), and the instance profile with access to the bucket (AWS).
    """

    region: str
    zones: str
    head_machine: str
    worker_machine: str
    project: str = ""
    profile: str = ""


DEFAULT_REGIONS = {
    "aws": CloudRegion("us-west-2", "us-west-2a,us-west-2b", "m6i.xlarge", "m6i.2xlarge"),
    "gcp": CloudRegion("us-west1", "us-west1-a", "n2-standard-4", "n2-standard-8"),
    "azure": CloudRegion("westus2", "auto", "Standard_D4s_v5", "Standard_D8s_v5", project="ray-cluster"),
}
"""Default regions and machines. A GPU job needs a worker machine with GPUs."""


def cloud(kind: str, needs: ClusterNeeds, region: CloudRegion) -> Document:
    """Return the configuration of a cluster on `aws`, `gcp` or `azure` (`kind`)."""
    node = NODE_CONFIGS[kind]
    types: Document = {
        HEAD: {
            "resources": {"CPU": 0},  # no ranks on the one node that must not be lost
            "node_config": node(region, region.head_machine, False, False),
            "min_workers": 0,
            "max_workers": 0,
        }
    }
    for group in needs.groups():
        types[group.name] = _node_type(
            group, node(region, region.worker_machine, group.spot, bool(group.gpu))
        )
        types[group.name]["labels"][MACHINE_TYPE] = region.worker_machine
    return {
        "cluster_name": needs.name,
        "max_workers": max(group.max for group in needs.groups()),
        "idle_timeout_minutes": 5,
        "provider": _provider(kind, region),
        "auth": {"ssh_user": "ubuntu"},
        "available_node_types": types,
        "head_node_type": HEAD,
        **_software(needs),
    }


def local(needs: ClusterNeeds, head_ip: str, worker_ips: tuple[str, ...], ssh_user: str) -> Document:
    """Return the configuration of a cluster on existing machines, reached by SSH."""
    return {
        "cluster_name": needs.name,
        "provider": {"type": "local", "head_ip": head_ip, "worker_ips": list(worker_ips)},
        "auth": {"ssh_user": ssh_user},
        **_software(needs),
    }


def _node_type(group: NodeGroup, node_config: Document) -> Document:
    resources = {"CPU": math.ceil(group.cpu)}
    if group.memory_gib:  # said here, it would count instead of what Ray finds on the machine
        resources["memory"] = int(group.memory_gib * 2**30)
    if group.gpu:
        resources["GPU"] = group.gpu
    return {
        "resources": resources,
        "labels": group.labels,
        "node_config": node_config,
        "min_workers": group.min,
        "max_workers": group.max,
    }


def _provider(kind: str, region: CloudRegion) -> Document:
    if kind == "aws":
        zones = {"availability_zone": region.zones, "cache_stopped_nodes": False}
        return {"type": kind, "region": region.region, **zones}
    if kind == "gcp":
        zone = region.zones.split(",")[0]
        return {
            "type": kind,
            "region": region.region,
            "availability_zone": zone,
            "project_id": region.project,
        }
    location = {"location": region.region, "resource_group": region.project}
    return {"type": kind, **location, "availability_zone": region.zones, "cache_stopped_nodes": False}


def _aws(region: CloudRegion, machine: str, spot: bool, gpu: bool) -> Document:
    disk = {
        "DeviceName": "/dev/sda1",
        "Ebs": {"VolumeSize": DISK_GIB, "VolumeType": "gp3", "Encrypted": True},
    }
    node: Document = {
        "InstanceType": machine,
        "BlockDeviceMappings": [disk],
        "MetadataOptions": {"HttpTokens": "required"},
    }
    if region.profile:
        node["IamInstanceProfile"] = {"Name": region.profile}
    if spot:
        node["InstanceMarketOptions"] = {"MarketType": "spot"}
    return node


def _gcp(region: CloudRegion, machine: str, spot: bool, gpu: bool) -> Document:
    image = GCP_IMAGES + (GCP_GPU_IMAGE if gpu else GCP_IMAGE)
    disk = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {"diskSizeGb": DISK_GIB, "sourceImage": image},
    }
    node: Document = {"machineType": machine, "disks": [disk]}
    scheduling: Document = {"preemptible": True} if spot else {}
    if gpu:  # a machine with GPUs cannot be moved to another host
        scheduling["onHostMaintenance"] = "TERMINATE"
    if scheduling:
        node["scheduling"] = [scheduling]
    return node


def _azure(region: CloudRegion, machine: str, spot: bool, gpu: bool) -> Document:
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


NODE_CONFIGS: dict[str, Callable[[CloudRegion, str, bool, bool], Document]] = {
    "aws": _aws,
    "gcp": _gcp,
    "azure": _azure,
}


def _software(needs: ClusterNeeds) -> Document:
    """The container image of every node, and the commands that start Ray.

    Ray requires the token and serves the dashboard on loopback (`ray dashboard` forwards it).
    """
    start = "ulimit -n 65536; RAY_AUTH_MODE=token ray start"
    shared = "--object-manager-port=8076"
    options = ["--ulimit nofile=65536:65536", "--env RAY_AUTH_MODE=token", "--shm-size=8g"]
    # The head need not have GPUs, and Docker starts nothing with --gpus where there are none.
    of_workers = {"worker_run_options": ["--gpus all"]} if needs.gpu else {}
    return {
        "docker": {
            "image": needs.image,
            "container_name": "orchestrator",
            "pull_before_run": True,
            "run_options": options,
            **of_workers,
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

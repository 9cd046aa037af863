"""The needs of one job: node groups, their sizes and labels."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DNS_LENGTH = 47
"""Longest RayJob name: KubeRay adds a suffix to it and allows 53 for the cluster (its MaxRayJobNameLength)."""


@dataclass(frozen=True)
class NodeGroup:
    """A group of `min` to `max` equal nodes, each with `cpu` CPUs, `gpu` GPUs, `memory_gib` GiB of memory and
    `disk_gib` GiB of disk."""

    name: str
    min: int
    max: int
    cpu: float
    gpu: int
    memory_gib: float
    disk_gib: float = 0.0
    accelerator: str = ""
    spot: bool = False
    selectors: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its Ray nodes: Ray's own, as far as they are known here, and those that the job selects by."""
        known_labels = {"ray.io/market-type": "spot" if self.spot else "on-demand"}
        if self.accelerator:
            known_labels["ray.io/accelerator-type"] = self.accelerator
        plain = {k: v for k, v in self.selectors.items() if v[0] != "!" and not v.startswith("in(")}
        return known_labels | {k: v for k, v in plain.items() if not k.startswith("ray.io/")}


@dataclass(frozen=True)
class ClusterNeeds:
    """The resources that a job needs on a cluster."""

    name: str
    image: str
    """The container image."""
    min_workers: int
    """The smallest number of ranks."""
    max_workers: int
    """The largest number of ranks."""
    cpu: float = 1.0
    """CPU cores of a worker."""
    gpu: int = 0
    """GPUs of a worker."""
    memory_gib: float = 4.0
    """GiB of memory of a worker; 0 for all of its machine's."""
    disk_gib: float = 0.0
    """GiB of disk of a node; 0 for all of its machine's."""
    per_node: int = 1
    """Workers that share a node, which keeps a tensor-parallel group on one machine."""
    accelerators: tuple[str, ...] = ()
    """The acceptable device types, the best first."""
    spot: bool = False
    """Whether the workers run on spot machines. The head never does."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label selectors of the workers' nodes, as in `cluster.workers.gang.Bundle`."""
    notices: bool = False
    """Whether the nodes poll the cloud for preemption notices."""
    ray_version: str = "2.60.0"

    def groups(self) -> tuple[NodeGroup, ...]:
        """Return one group for each device type. The first has at least the minimum; each may grow to the whole job."""
        minimum = math.ceil(self.min_workers / self.per_node)
        maximum = math.ceil(self.max_workers / self.per_node)
        kinds = self.accelerators or ("gpu" if self.gpu else "cpu",)
        return tuple(
            NodeGroup(
                name=dns_name(kind.lower() + ("-spot" if self.spot else "")),
                min=minimum if i == 0 else 0,
                max=maximum,
                cpu=self.cpu * self.per_node,
                gpu=self.gpu * self.per_node,
                memory_gib=self.memory_gib * self.per_node,
                disk_gib=self.disk_gib,
                accelerator=kind if self.accelerators else "",
                spot=self.spot,
                selectors=self.labels,
            )
            for i, kind in enumerate(kinds)
        )


def dns_name(name: str) -> str:
    """Return `name` as a DNS label of RFC 1035 with at most 47 characters.

    A changed name gets a digest, so that distinct names stay distinct.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"r-{plain}".rstrip("-")
    if plain == name and len(plain) <= DNS_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[: DNS_LENGTH - 7].rstrip('-')}-{digest}"

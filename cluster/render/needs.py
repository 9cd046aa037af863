"""What one job needs of a cluster: node groups, their sizes and labels."""

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
    """A group of `min` to `max` equal nodes, each with `cpu` CPUs, `gpu` GPUs and `memory_gib` GiB of memory."""

    name: str
    min: int
    max: int
    cpu: float
    gpu: int
    memory_gib: float
    accelerator: str = ""
    spot: bool = False
    selectors: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its Ray nodes: Ray's own as far as they are known here, and others that the job selects by."""
        own = {"ray.io/market-type": "spot" if self.spot else "on-demand"}
        if self.accelerator:
            own["ray.io/accelerator-type"] = self.accelerator
        plain = {k: v for k, v in self.selectors.items() if v[0] != "!" and not v.startswith("in(")}
        return own | {k: v for k, v in plain.items() if not k.startswith("ray.io/")}


@dataclass(frozen=True)
class ClusterNeeds:
    """What a job needs: `min_workers` to `max_workers` ranks, and what each of them occupies.

    `cpu` cores, `gpu` devices and `memory_gib` GiB (0 for what their machines have) are per worker; `per_node` workers
    share a node, which keeps a tensor-parallel group on one machine. `accelerators` are the device types that are
    acceptable, the best first; `spot` puts the workers, never the head, on spot machines; `labels` are the label
    selectors of the workers' nodes, as in `cluster.workers.gang.Bundle`; with `notices` the nodes poll the cloud for
    preemption notices.
    """

    name: str
    image: str
    min_workers: int
    max_workers: int
    cpu: float = 1.0
    gpu: int = 0
    memory_gib: float = 4.0
    per_node: int = 1
    accelerators: tuple[str, ...] = ()
    spot: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    notices: bool = False
    ray_version: str = "2.60.0"

    def groups(self) -> tuple[NodeGroup, ...]:
        """One group for each device type. The first has at least the minimum; each may grow to the whole job."""
        minimum, maximum = (
            math.ceil(self.min_workers / self.per_node),
            math.ceil(self.max_workers / self.per_node),
        )
        kinds = self.accelerators or ("gpu" if self.gpu else "cpu",)
        return tuple(
            NodeGroup(
                name=dns_name(kind.lower() + ("-spot" if self.spot else "")),
                min=minimum if i == 0 else 0,
                max=maximum,
                cpu=self.cpu * self.per_node,
                gpu=self.gpu * self.per_node,
                memory_gib=self.memory_gib * self.per_node,
                accelerator=kind if self.accelerators else "",
                spot=self.spot,
                selectors=self.labels,
            )
            for i, kind in enumerate(kinds)
        )


def dns_name(name: str) -> str:
    """`name` as a DNS label of RFC 1035 with at most 47 characters; a digest is added if the name had to be changed, so
    that distinct names stay distinct."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"r-{plain}".rstrip("-")
    if plain == name and len(plain) <= DNS_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[: DNS_LENGTH - 7].rstrip('-')}-{digest}"

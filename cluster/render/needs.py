"""What one job asks of the machines under it."""

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
    """Nodes alike: `min` to `max` of them, each with so many CPUs, GPUs and GiB of memory."""

    name: str
    min: int
    max: int
    cpu: float
    gpu: int
    memory_gib: float
    accelerator: str = ""
    spot: bool = False
    wanted: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Of its nodes: Ray's own as far as they are known here, and those of other names that the job asks for."""
        own = {"ray.io/market-type": "spot" if self.spot else "on-demand"}
        if self.accelerator:
            own["ray.io/accelerator-type"] = self.accelerator
        plain = {k: v for k, v in self.wanted.items() if v[0] != "!" and not v.startswith("in(")}
        return own | {k: v for k, v in plain.items() if not k.startswith("ray.io/")}


@dataclass(frozen=True)
class ClusterNeeds:
    """A job seen by the machines: `min_workers` to `max_workers` ranks, and what each of them occupies.

    `cpu` cores, `gpu` devices and `memory_gib` GiB are per worker; `per_node` workers share a node, which is what
    keeps a tensor-parallel group on one machine. `accelerators` names the device types that will do, the best
    first; `spot` puts the workers, never the head, on machines that may be taken away; `labels` are what the job
    wants of the nodes of its workers, as in `cluster.workers.gang.Bundle`; `notices` says that a cloud's word of
    machines that will be taken away is asked for on them.
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
        """A group for each device type. The first holds the minimum; any of them may hold the whole job."""
        least, most = math.ceil(self.min_workers / self.per_node), math.ceil(self.max_workers / self.per_node)
        kinds = self.accelerators or ("gpu" if self.gpu else "cpu",)
        return tuple(
            NodeGroup(
                name=dns_name(kind.lower() + ("-spot" if self.spot else "")),
                min=least if i == 0 else 0,
                max=most,
                cpu=self.cpu * self.per_node,
                gpu=self.gpu * self.per_node,
                memory_gib=self.memory_gib * self.per_node,
                accelerator=kind if self.accelerators else "",
                spot=self.spot,
                wanted=self.labels,
            )
            for i, kind in enumerate(kinds)
        )


def dns_name(name: str) -> str:
    """`name` as a DNS label of RFC 1035, at most 47 characters: the same for the same name, distinct for distinct
    ones (a digest is added when something had to change)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"r-{plain}".rstrip("-")
    if plain == name and len(plain) <= DNS_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[: DNS_LENGTH - 7].rstrip('-')}-{digest}"

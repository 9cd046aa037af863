"""The machine of a process, and what Ray knows of those under the nodes: memory, accelerator, machine type, market and
zone."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.workers.gang import Bundle

MACHINE_TYPE = "node.kubernetes.io/instance-type"
"""Node label with the cloud's name of the machine type; Ray has none of its own."""


@dataclass(frozen=True)
class Offer:
    """What a node offers one worker: bytes of host memory, and the name of its accelerator, empty on CPU."""

    memory: float
    accelerator: str = ""


def this_machine() -> dict[str, Any]:
    """{"processor", "cores", "host"}: the name of this machine's processor, how many cores it has, its own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, "") or platform.processor() or platform.machine()
    return {"processor": processor, "cores": os.cpu_count() or 1, "host": socket.gethostname()}


def smallest_offer(bundle: Bundle) -> Offer | None:
    """What a worker has on the alive node that offers it least; None if no node can hold one.

    Host memory is divided among the workers that fit on a node. Ray does not know a GPU's own memory; the planner
    looks it up by the accelerator's name.
    """
    import ray

    from cluster.workers.nodes import fitting_workers

    offers = []
    for node in ray.nodes():
        total = node["Resources"]
        workers = fitting_workers(total, node.get("Labels", {}), bundle)
        if node["Alive"] and workers:
            kinds = [key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")]
            offers.append(Offer(total.get("memory", 0.0) / workers, kinds[0] if kinds and bundle.gpu else ""))
    return min(offers, key=lambda offer: offer.memory, default=None)


def machines(addresses: Sequence[str]) -> list[dict[str, str]]:
    """{"node", "machine", "market", "zone"} of the nodes at these addresses, empty where a label is missing.

    Ray's own labels are ray.io/market-type and ray.io/availability-zone.
    """
    import ray

    keys = {"machine": MACHINE_TYPE, "market": "ray.io/market-type", "zone": "ray.io/availability-zone"}
    labels = {n["NodeManagerAddress"]: n.get("Labels") or {} for n in ray.nodes() if n["Alive"]}
    return [
        {"node": ip, **{name: str(labels.get(ip, {}).get(label, "")) for name, label in keys.items()}}
        for ip in addresses
    ]

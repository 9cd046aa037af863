"""What one worker of a cluster offers, as far as Ray knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.workers.gang import Bundle

MACHINE_TYPE = "node.kubernetes.io/instance-type"
"""Label of a node with the cloud's name of its machine type; Ray has none of its own."""


@dataclass(frozen=True)
class Offer:
    """Bytes of memory for one worker, and the name of its accelerator, empty on CPU."""

    memory: float
    accelerator: str = ""


def smallest_offer(bundle: Bundle) -> Offer | None:
    """What a worker has on the alive node that gives it least; None if no node can hold one.

    Host memory is shared by the workers that fit on a node. A GPU's own memory is not known to Ray; the planner
    knows it by the accelerator's name.
    """
    import ray

    from cluster.workers.nodes import room

    offers = []
    for node in ray.nodes():
        total = node["Resources"]
        workers = room(total, node.get("Labels", {}), bundle)
        if node["Alive"] and workers:
            kinds = [key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")]
            offers.append(Offer(total.get("memory", 0.0) / workers, kinds[0] if kinds and bundle.gpu else ""))
    return min(offers, key=lambda offer: offer.memory, default=None)


def machines(addresses: Sequence[str]) -> list[dict[str, str]]:
    """Type, market and zone of the nodes at these addresses, as far as their labels tell; else empty.

    Ray's own labels are ray.io/market-type and ray.io/availability-zone.
    """
    import ray

    keys = {"machine": MACHINE_TYPE, "market": "ray.io/market-type", "zone": "ray.io/availability-zone"}
    labels = {n["NodeManagerAddress"]: n.get("Labels") or {} for n in ray.nodes() if n["Alive"]}
    return [
        {"node": ip, **{name: str(labels.get(ip, {}).get(label, "")) for name, label in keys.items()}}
        for ip in addresses
    ]

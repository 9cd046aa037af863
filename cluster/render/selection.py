"""Which nodes a worker's pod may stand on, so that what its Ray node says of itself is true."""

from __future__ import annotations

from typing import Any

from cluster.render.needs import NodeGroup
from cluster.workers.gang import values_of

ACCELERATOR, MARKET = "ray.io/accelerator-type", "ray.io/market-type"
NODE_LABELS = {
    "ray.io/availability-zone": "topology.kubernetes.io/zone",
    "ray.io/region": "topology.kubernetes.io/region",
}
"""Ray's label to that of a Kubernetes node. Of the others both have the same name."""


def ray_labels(group: NodeGroup) -> dict[str, str]:
    """Those of the group's Ray nodes, the zone and region that their pods are bound to included."""
    bound = {k: v for k, v in group.wanted.items() if k in NODE_LABELS and values_of(v) == [v]}
    return group.labels | bound


def selection(group: NodeGroup, spot: tuple[str, str]) -> dict[str, Any]:
    """nodeSelector and affinity of the group's pods; spot is the label of a node that may be taken away."""
    selector, terms = {}, []
    if group.spot:
        selector[spot[0]] = spot[1]
    else:
        terms.append(_term(spot[0], f"!{spot[1]}"))
    if group.accelerator:
        selector[ACCELERATOR] = group.accelerator
    for label, wanted in group.wanted.items():
        name = NODE_LABELS.get(label, label)
        if label == MARKET or name in selector:
            continue
        if values_of(wanted) == [wanted]:
            selector[name] = wanted
        else:
            terms.append(_term(name, wanted))
    found: dict[str, Any] = {"nodeSelector": selector} if selector else {}
    if terms:
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        found["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return found


def _term(name: str, wanted: str) -> dict[str, Any]:
    return {"key": name, "operator": "NotIn" if wanted[0] == "!" else "In", "values": values_of(wanted)}

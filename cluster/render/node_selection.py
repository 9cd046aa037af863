"""Which Kubernetes nodes a worker's pod may run on, so that the labels of its Ray node are true."""

from __future__ import annotations

from typing import Any

from cluster.render.needs import NodeGroup
from cluster.workers.gang import values_of

ACCELERATOR, MARKET = "ray.io/accelerator-type", "ray.io/market-type"
NODE_LABELS = {
    "ray.io/availability-zone": "topology.kubernetes.io/zone",
    "ray.io/region": "topology.kubernetes.io/region",
}
"""Label of a Ray node to label of a Kubernetes node. Other labels have the same name on both."""


def ray_labels(group: NodeGroup) -> dict[str, str]:
    """Labels of the group's Ray nodes, with the zone and region that their pods are bound to."""
    bound = {k: v for k, v in group.selectors.items() if k in NODE_LABELS and values_of(v) == [v]}
    return group.labels | bound


def node_selection(group: NodeGroup, spot: tuple[str, str]) -> dict[str, Any]:
    """nodeSelector and affinity of the group's pods; `spot` is the label (name, value) of a spot node."""
    selector, terms = {}, []
    if group.spot:
        selector[spot[0]] = spot[1]
    else:
        terms.append(_term(spot[0], f"!{spot[1]}"))
    if group.accelerator:
        selector[ACCELERATOR] = group.accelerator
    for label, wanted in group.selectors.items():
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
    return {
        "key": name,
        "operator": "NotIn" if wanted[0] == "!" else "In",
        "values": values_of(wanted),
    }

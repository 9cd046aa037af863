"""Select the Kubernetes nodes for a worker's pod, so that the labels of its Ray node are true."""

from __future__ import annotations

from typing import Any

from cluster.workers.gang import values_of
from cluster.workers.machine import ACCELERATOR
from orchestrator.extensions.render.cluster_needs import NodeGroup

MARKET = "ray.io/market-type"
NODE_LABELS = {
    "ray.io/availability-zone": "topology.kubernetes.io/zone",
    "ray.io/region": "topology.kubernetes.io/region",
}
"""Labels of Ray nodes and the corresponding labels of Kubernetes nodes. Other labels have the same name on both."""
ACCELERATORS = {
    "gke": (
        "cloud.google.com/gke-accelerator",
        {
            "T4": "nvidia-tesla-t4",
            "V100": "nvidia-tesla-v100",
            "L4": "nvidia-l4",
            "A100-40G": "nvidia-tesla-a100",
            "A100-80G": "nvidia-a100-80gb",
            "H100": "nvidia-h100-80gb",
            "H200": "nvidia-h200-141gb",
            "B200": "nvidia-b200",
        },
    ),
    "karpenter": (
        "karpenter.k8s.aws/instance-gpu-name",
        {name: name.lower() for name in ("T4", "V100", "A10G", "L4", "L40S", "A100", "H100", "H200", "B200")},
    ),
}
"""A platform's own label for GPUs, and its values by Ray's names, from the platform's manual."""


def ray_labels(group: NodeGroup) -> dict[str, str]:
    """Return the labels of the group's Ray nodes, with the zone and region that their pods are bound to."""
    bound = {k: v for k, v in group.selectors.items() if k in NODE_LABELS and values_of(v) == [v]}
    return group.labels | bound


def accelerator_label(accelerator: str, platform: str) -> tuple[str, str]:
    """Return the name and value of the label that selects nodes with this accelerator.

    It is the platform's own label if it has one, else Ray's, which an administrator must set on the nodes.
    """
    name, values = ACCELERATORS.get(platform, (ACCELERATOR, {}))
    return (name, values[accelerator]) if accelerator in values else (ACCELERATOR, accelerator)


def node_selection(group: NodeGroup, spot: tuple[str, str], platform: str = "") -> dict[str, Any]:
    """Return nodeSelector and affinity of the group's pods. `spot` is the label (name, value) of a spot node."""
    selector, terms = {}, []
    if group.spot:
        selector[spot[0]] = spot[1]
    else:
        terms.append(_term(spot[0], f"!{spot[1]}"))
    if group.accelerator:
        label, value = accelerator_label(group.accelerator, platform)
        selector[label] = value
    for label, wanted in group.selectors.items():
        name = NODE_LABELS.get(label, label)
        if label == MARKET or name in selector or (label == ACCELERATOR and group.accelerator):
            continue
        if values_of(wanted) == [wanted]:
            selector[name] = wanted
        else:
            terms.append(_term(name, wanted))
    result: dict[str, Any] = {"nodeSelector": selector} if selector else {}
    if terms:
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        result["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return result


def _term(name: str, wanted: str) -> dict[str, Any]:
    return {
        "key": name,
        "operator": "NotIn" if wanted[0] == "!" else "In",
        "values": values_of(wanted),
    }

"""Describe machines: this one, and those of Ray's nodes, with memory, accelerator, machine type, market and zone."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.workers.gang import Bundle
from cluster.workers.nvml import Nvml

ACCELERATOR = "ray.io/accelerator-type"
"""Ray's node label with the type of a GPU, such as H100."""
MACHINE_TYPE = "node.kubernetes.io/instance-type"
"""Node label with the cloud's name of the machine type; Ray has none of its own."""

CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The files with a container's memory limit on Linux, for cgroups of version 2 and 1."""
DRIVER_TIMEOUT = 30.0
"""Seconds to wait until the drivers on the nodes have described their GPUs."""


def processors_here() -> int:
    """Return how many CPUs this process may use, which may be fewer than the machine has (container, `taskset`)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Offer:
    """The resources that a node offers one worker."""

    memory: float
    """Bytes of host memory."""
    accelerator: str = ""
    """The name of its accelerator, empty on CPU."""
    accelerator_memory: float = 0.0
    """Bytes of the accelerator's memory, 0 if its driver does not say."""


def host_memory() -> float:
    """Return the bytes of memory of this machine, or of the container that this process is in."""
    result = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        try:
            result.append(int(file.read_text()))
        except (OSError, ValueError):  # no such file, or it contains "max"
            continue
    # A container sees the memory of its machine, but is killed at its own limit.
    return float(min(result))


def this_machine() -> dict[str, Any]:
    """Return {"processor", "cores", "host"}: the name of this machine's CPU, its number of cores, its host name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, "") or platform.processor() or platform.machine()
    return {"processor": processor, "cores": os.cpu_count() or 1, "host": socket.gethostname()}


def smallest_offer(bundle: Bundle, max_workers: int) -> Offer | None:
    """Return what the worst alive node offers one worker; None if no node can hold one.

    A node's host memory is divided among the workers that fit on it, at most `max_workers`. If there are several kinds
    of GPUs, the one with the least memory counts, as its driver reports it: Ray's names do not distinguish variants
    with different memory.

    Args:
        bundle: what one worker occupies.
        max_workers: the largest number of workers.
    """
    import ray

    from cluster.workers.nodes import fitting_workers

    offers_by_node = {}
    for node in ray.nodes():
        total = node["Resources"]
        workers = fitting_workers(total, node.get("Labels", {}), bundle)
        if node["Alive"] and workers:
            kinds = [key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")]
            memory = total.get("memory", 0.0) / min(workers, max_workers)
            offers_by_node[node["NodeID"]] = Offer(memory, kinds[0] if kinds and bundle.gpu else "")
    if not offers_by_node:
        return None
    offers = [*offers_by_node.values()]
    if bundle.gpu:
        known = _by_driver([*offers_by_node])
        offers = [
            Offer(each.memory, *known.get(node, (each.accelerator,))) for node, each in offers_by_node.items()
        ]
    smallest = min(offers, key=lambda offer: (offer.accelerator_memory or math.inf, offer.memory))
    return dataclasses.replace(smallest, memory=min(offer.memory for offer in offers))


def _by_driver(nodes: list[str]) -> dict[str, tuple[str, float]]:
    """The name and bytes of each node's smallest GPU, for the nodes whose driver answers in time."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(smallest_gpu)
    node_of_task = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        node_of_task[remote.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()] = node
    done, late = ray.wait([*node_of_task], num_returns=len(node_of_task), timeout=DRIVER_TIMEOUT)
    for reference in late:
        ray.cancel(reference, force=True)
    result = {}
    for reference in done:
        try:
            name, memory = ray.get(reference)
        except RayError:  # its node is gone
            continue
        if name:
            result[node_of_task[reference]] = name, memory
    return result


def smallest_gpu() -> tuple[str, float]:
    """Return the name and bytes of this machine's GPU with the least memory, by its driver; ("", 0) if unknown."""
    driver = Nvml()
    result = zip(driver.names(), (device.total or 0.0 for device in driver.read()), strict=False)
    return min(result, key=lambda each: each[1], default=("", 0.0))


def machines(addresses: Sequence[str]) -> list[dict[str, str]]:
    """Return {"node", "machine", "market", "zone"} of the nodes at these addresses, empty where a label is missing.

    Ray's own labels are ray.io/market-type and ray.io/availability-zone.
    """
    import ray

    keys = {"machine": MACHINE_TYPE, "market": "ray.io/market-type", "zone": "ray.io/availability-zone"}
    labels = {n["NodeManagerAddress"]: n.get("Labels") or {} for n in ray.nodes() if n["Alive"]}
    return [
        {"node": ip, **{name: str(labels.get(ip, {}).get(label, "")) for name, label in keys.items()}}
        for ip in addresses
    ]

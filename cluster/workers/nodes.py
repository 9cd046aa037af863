"""What Ray knows of its nodes: who is alive, what is free, who is to be taken away."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError

from cluster.workers.gang import Bundle

RPC_TIMEOUT = 2.0
"""Seconds that a question to Ray's control store may take."""


@dataclass(frozen=True)
class Node:
    """An alive node: Ray's id, its address, resources in all and free, and labels."""

    id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def alive() -> list[Node]:
    """The alive nodes that have processors."""
    from ray._private.state import available_resources_per_node  # no public call tells it by node

    free = available_resources_per_node()
    found = (node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
    return [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            n["Resources"],
            free.get(n["NodeID"], {}),
            n.get("Labels", {}),
        )
        for n in found
    ]


def leaving() -> frozenset[str]:
    """The ids of nodes that are drained: they take nothing new, and end at their deadline."""
    from ray._private.worker import global_worker  # no public call tells it

    with contextlib.suppress(RayError, RuntimeError):
        client = global_worker.gcs_client  # type: ignore[attr-defined]
        return frozenset(client.get_draining_nodes(timeout=RPC_TIMEOUT))
    return frozenset()


def unreachable(asked: Iterable[str], timeout: float) -> frozenset[str]:
    """Those of these ids whose raylet accepts no connection within `timeout` seconds: it is dead, its machine is, or
    the network between is cut. A worker of Ray that is gone says nothing of its node."""
    where = {n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in ray.nodes() if n["Alive"]}
    known = sorted(set(asked))

    def is_reached(node: str) -> bool:
        try:
            socket.create_connection(where[node], timeout).close()
        except (OSError, KeyError):
            return False
        return True

    with ThreadPoolExecutor(max(len(known), 1)) as pool:
        reached = list(pool.map(is_reached, known))
    return frozenset(node for node, is_there in zip(known, reached, strict=True) if not is_there)


def drain(node: str, seconds: float, why: str) -> bool:
    """Tell Ray that the node of that id will be taken away in so many seconds; whether it accepts that."""
    from ray._private.worker import global_worker  # no public call tells it
    from ray.core.generated import autoscaler_pb2 as messages

    reason = messages.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    client = global_worker.gcs_client  # type: ignore[attr-defined]
    accepted, _ = client.drain_node(node, reason, why, int((time.time() + seconds) * 1000))
    return bool(accepted)


def room(resources: Mapping[str, float], labels: Mapping[str, str], bundle: Bundle) -> int:
    """How many workers of that size fit into a node's resources, none if its labels do not suit."""
    if not bundle.suits(labels):
        return 0
    return int(min(resources.get(key, 0.0) / needed for key, needed in bundle.resources.items()) + 1e-6)


def free(bundle: Bundle, avoid: Set[str]) -> int:
    """How many workers would fit now on nodes whose id and address are not to be avoided, nor are leaving."""
    avoided = avoid | leaving()
    here = (n for n in alive() if n.id not in avoided and n.address not in avoided)
    return sum(room(n.free, n.labels, bundle) for n in here)

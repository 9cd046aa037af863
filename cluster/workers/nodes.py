"""The nodes of the Ray cluster: which are alive, what is free on them, and which are being drained."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import ray

from cluster.workers import ray_internals
from cluster.workers.gang import Bundle

RPC_TIMEOUT = 2.0
"""Seconds that Ray's head has to answer a question."""


@dataclass(frozen=True)
class Node:
    """An alive node: Ray's id, IP address, total and free resources by Ray's names, and labels."""

    id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def alive() -> list[Node]:
    """The alive nodes that have CPUs; a head that only coordinates has none."""
    free = ray_internals.free_resources_by_node()
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


def draining() -> frozenset[str]:
    """The ids of nodes that are being drained: they accept nothing new, and end at their deadline."""
    return ray_internals.draining_nodes(RPC_TIMEOUT)


def unreachable(node_ids: Iterable[str], timeout: float) -> frozenset[str]:
    """Those of the nodes whose raylet accepts no connection within `timeout` seconds: the raylet or the machine is
    dead, or the network is cut. (That a worker process is gone says nothing about its node.)"""
    endpoints = {
        n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in ray.nodes() if n["Alive"]
    }
    ids = sorted(set(node_ids))

    def is_reachable(node_id: str) -> bool:
        try:
            socket.create_connection(endpoints[node_id], timeout).close()
        except (OSError, KeyError):
            return False
        return True

    with ThreadPoolExecutor(max(len(ids), 1)) as pool:
        answers = list(pool.map(is_reachable, ids))
    return frozenset(node_id for node_id, reachable in zip(ids, answers, strict=True) if not reachable)


def drain(node_id: str, seconds: float, message: str) -> bool:
    """Announce to Ray that a node will be taken away in `seconds`; returns whether Ray accepts."""
    return ray_internals.drain_node(node_id, seconds, message)


def fitting_workers(resources: Mapping[str, float], labels: Mapping[str, str], bundle: Bundle) -> int:
    """How many workers of that size fit into a node's resources; 0 if its labels do not match."""
    if not bundle.suits(labels):
        return 0
    return int(min(resources.get(key, 0.0) / needed for key, needed in bundle.resources.items()) + 1e-6)


def free_workers(bundle: Bundle, avoid: Set[str]) -> int:
    """How many workers would fit now, without draining nodes and those in `avoid` (ids or addresses)."""
    avoided = avoid | draining()
    usable = (n for n in alive() if n.id not in avoided and n.address not in avoided)
    return sum(fitting_workers(n.free, n.labels, bundle) for n in usable)

"""The nodes of the Ray cluster: which are alive, what is free on them, and which are being drained."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError

from cluster.workers import ray_internals
from cluster.workers.gang import Bundle, DrainAnswer

RPC_TIMEOUT = 2.0
"""Seconds to wait for an answer of Ray's head."""


@dataclass(frozen=True)
class Node:
    """An alive node: Ray's id, its IP address, its total and free resources by Ray's names, and its labels."""

    id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def alive() -> list[Node]:
    """Return the alive nodes that have CPUs. A head that only coordinates has none."""
    free = ray_internals.free_resources_by_node()
    result = (node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
    return [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            n["Resources"],
            free.get(n["NodeID"], {}),
            n.get("Labels", {}),
        )
        for n in result
    ]


def draining() -> frozenset[str]:
    """Return the ids of nodes that are being drained. They accept no new work, and end at their deadline."""
    return ray_internals.draining_nodes(RPC_TIMEOUT)


def unreachable(node_ids: Iterable[str], timeout: float) -> frozenset[str]:
    """Return the nodes whose raylet accepts no connection within `timeout` seconds.

    Their raylet or machine is dead, or the network is cut. A dead worker process alone says nothing about its node.

    Args:
        node_ids: the nodes to ask.
        timeout: seconds for each, all at the same time.
    """
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
    """Announce to Ray that a node will be taken away in `seconds`. Return whether Ray accepts.

    Args:
        node_id: Ray's id of the node.
        seconds: until it is taken away.
        message: why, for Ray's log.
    """
    return ray_internals.drain_node(node_id, seconds, message)


def drain_idle(address: str) -> DrainAnswer:
    """Take the nodes at an address out of the cluster if nothing runs there, see `Cluster.drain`.

    The head and the node of this process stay: without them the run would end.
    """
    own_node = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if not node["Alive"] or node["NodeManagerAddress"] != address:
            continue
        if ray_internals.HEAD in node["Resources"]:
            return DrainAnswer(is_final=True, refusal="the head of the cluster runs there")
        if node["NodeID"] == own_node:
            return DrainAnswer(is_final=True, refusal="the controller of the run is there")
        try:
            accepted = ray_internals.drain_idle_node(node["NodeID"], "it computes wrongly")
        except (RayError, RuntimeError) as error:
            return DrainAnswer(is_final=False, refusal=f"Ray does not answer ({type(error).__name__})")
        if not accepted:
            return DrainAnswer(is_final=False, refusal="other work runs there")
    return DrainAnswer(is_final=True)


def fitting_workers(resources: Mapping[str, float], labels: Mapping[str, str], bundle: Bundle) -> int:
    """Return how many workers fit into a node's resources; 0 if its labels do not match.

    Args:
        resources: of the node, free or in total, by Ray's names.
        labels: of the node.
        bundle: what one worker occupies.
    """
    if not bundle.suits(labels):
        return 0
    # Fractions of a GPU: 0.3 / 0.1 is less than 3 in floating point.
    return int(min(resources.get(key, 0.0) / needed for key, needed in bundle.resources.items()) + 1e-6)


def free_workers(bundle: Bundle, avoid: Set[str]) -> int:
    """Return how many workers fit now, without draining nodes and those in `avoid` (ids or addresses).

    Args:
        bundle: what one worker occupies.
        avoid: ids or addresses of nodes to leave out.
    """
    return sum(workers for _, workers in free_by_node(alive(), bundle, avoid))


def free_by_node(among: Iterable[Node], bundle: Bundle, avoid: Set[str]) -> list[tuple[Node, int]]:
    """Return each node that `free_workers` counts, and how many workers fit on it.

    Args:
        among: the alive nodes.
        bundle: what one worker occupies.
        avoid: ids or addresses of nodes to leave out.
    """
    avoided = avoid | draining()
    usable = (node for node in among if node.id not in avoided and node.address not in avoided)
    return [(node, fitting_workers(node.free, node.labels, bundle)) for node in usable]

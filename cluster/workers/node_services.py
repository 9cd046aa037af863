"""Small services that run once on every node of a Ray cluster, beside the gang; fork servers are in `worker_group`."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

START_TIMEOUT = 60.0
"""Seconds for a node to start its service; a node that takes longer is left out."""


class NodeService:
    """An actor with one object of "module:Class", which serves on the node's address as long as the actor lives."""

    def __init__(self, target: str, token: str) -> None:
        module, _, name = target.partition(":")
        self._node = ray.util.get_node_ip_address()
        self._service = getattr(importlib.import_module(module), name)(token, self._node)

    def location(self) -> dict[str, str]:
        """The address of the node, and the address at which the service answers."""
        return {"node": self._node, "address": self._service.address}

    def serve_forever(self) -> None:
        """Never return. An actor that waits for calls wakes a hundred times a second to check for signals, and ranks
        may need every CPU of the node; this one needs no further calls, `ray.kill` ends it."""
        threading.Event().wait()


class RayNodeServices:
    """`NodeServices` on Ray: one actor on each node that has CPUs. They end with the process that made this object."""

    def __init__(self, target: str, token: str) -> None:
        self._target, self._token = target, token
        self._actors: dict[str, Any] = {}
        self._locations: dict[str, dict[str, str]] = {}

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        """See `NodeServices.ensure_running`."""
        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")}
        if len(alive) < min_nodes:
            return []
        for node in self._actors.keys() - alive:
            self._actors.pop(node)
            self._locations.pop(node, None)
        remote: Any = ray.remote(NodeService)
        for node in alive - self._actors.keys():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = remote.options(num_cpus=0, scheduling_strategy=strategy).remote(self._target, self._token)
            self._actors[node] = actor
        for node, actor in list(self._actors.items()):
            if node in self._locations:
                continue  # it may be gone; its client notices that sooner than a question from here would
            try:
                self._locations[node] = ray.get(actor.location.remote(), timeout=START_TIMEOUT)
                actor.serve_forever.remote()
            except RayError:
                self._actors.pop(node)
                self._locations.pop(node, None)
        return [self._locations[node] for node in sorted(self._locations)]

    def stop(self) -> None:
        """See `NodeServices.stop`."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._locations = {}, {}

"""Small services that live on every node of a Ray cluster, beside the gang."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

START_TIMEOUT = 60.0
"""Seconds for a node to start its service; a node that does not is left out."""


class NodeService:
    """An object made from "module:Class" that serves on its node's address as long as this actor lives."""

    def __init__(self, target: str, token: str) -> None:
        module, _, name = target.partition(":")
        self._node = ray.util.get_node_ip_address()
        self._service = getattr(importlib.import_module(module), name)(token, self._node)

    def place(self) -> dict[str, str]:
        """The node, and the address that the service answers at."""
        return {"node": self._node, "address": self._service.address}

    def rest(self) -> None:
        """Never return. An actor that waits for calls wakes a hundred times a second to look for signals, and ranks
        may need every processor of the node; this one has nothing more to hear than `ray.kill`."""
        threading.Event().wait()


class RayNodeServices:
    """One service a node that has processors. They end with the process that holds this."""

    def __init__(self, target: str, token: str) -> None:
        self._target, self._token = target, token
        self._actors: dict[str, Any] = {}
        self._places: dict[str, dict[str, str]] = {}

    def everywhere(self, at_least: int = 1) -> list[dict[str, str]]:
        """{"node", "address"} of the services on all alive nodes; started where there is none yet. None at all where
        there are fewer nodes than `at_least`."""
        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")}
        if len(alive) < at_least:
            return []
        for node in self._actors.keys() - alive:
            self._actors.pop(node)
            self._places.pop(node, None)
        remote: Any = ray.remote(NodeService)
        for node in alive - self._actors.keys():
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = remote.options(num_cpus=0, scheduling_strategy=where).remote(self._target, self._token)
            self._actors[node] = actor
        for node, actor in list(self._actors.items()):
            if node in self._places:
                continue  # it may be gone, but whoever needs it finds that out sooner than it can be asked here
            try:
                self._places[node] = ray.get(actor.place.remote(), timeout=START_TIMEOUT)
                actor.rest.remote()
            except RayError:
                self._actors.pop(node)
                self._places.pop(node, None)
        return [self._places[node] for node in sorted(self._places)]

    def stop(self) -> None:
        """End them all."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._places = {}, {}

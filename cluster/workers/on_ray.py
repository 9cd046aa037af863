"""The Ray cluster that this process is connected to, as a `Cluster`."""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import secrets
import threading
from collections.abc import Set
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.workers import nodes
from cluster.workers.cluster import Cluster, RemoteTask
from cluster.workers.machine import machines, smallest_offer
from cluster.workers.ray_gang import RayGang
from cluster.workers.ray_internals import full_folder
from cluster.workers.shared_imports import CallInCopy

START_TIMEOUT = 60.0
"""Seconds to wait until a node has started its service. Slower nodes are left out."""


class NodeService:
    """An actor that holds one object of "module:Class", which serves at the node's address while the actor lives."""

    def __init__(self, target: str, token: str) -> None:
        module, _, name = target.partition(":")
        self._node = ray.util.get_node_ip_address()
        self._service = getattr(importlib.import_module(module), name)(token, self._node)

    def location(self) -> dict[str, str]:
        """Return the address of the node, and the address at which the service answers."""
        return {"node": self._node, "address": self._service.address}

    def serve_forever(self) -> None:
        """Never return; `ray.kill` ends the actor.

        An actor that waits for calls wakes a hundred times a second to check for signals, and ranks may need every CPU
        of the node.
        """
        threading.Event().wait()


class RayNodeServices:
    """`NodeServices` on Ray: one actor on each node that has CPUs. They end with the process that made this object."""

    def __init__(self, target: str, token: str) -> None:
        self._target = target
        self._token = token
        self._actors: dict[str, Any] = {}
        self._locations: dict[str, dict[str, str]] = {}
        self._served: dict[str, Any] = {}
        """References that are ready when the actor of a node has ended."""
        self._left: Set[str] = frozenset()
        """Addresses of nodes that get no actor."""

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        """See `NodeServices.ensure_running`."""
        alive = {
            n["NodeID"]
            for n in ray.nodes()
            if n["Alive"] and n["Resources"].get("CPU") and n["NodeManagerAddress"] not in self._left
        }
        if len(alive) < min_nodes:
            return []
        ended = {node for node, served in self._served.items() if ray.wait([served], timeout=0)[0]}
        for node in (self._actors.keys() - alive) | ended:
            self._forget(node)
        remote: Any = ray.remote(NodeService)
        for node in alive - self._actors.keys():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = remote.options(num_cpus=0, scheduling_strategy=strategy).remote(self._target, self._token)
            self._actors[node] = actor
        for node, actor in list(self._actors.items()):
            if node in self._locations:
                continue
            try:
                self._locations[node] = ray.get(actor.location.remote(), timeout=START_TIMEOUT)
                self._served[node] = actor.serve_forever.remote()
            except RayError:
                self._forget(node)
        return [self._locations[node] for node in sorted(self._locations)]

    def leave(self, addresses: Set[str]) -> None:
        """See `NodeServices.leave`."""
        new = addresses - self._left
        if not new:  # it is called again and again
            return
        self._left |= new
        for node in ray.nodes():
            actor = self._actors.get(node["NodeID"])
            if actor is not None and node["NodeManagerAddress"] in new:
                ray.kill(actor)
                self._forget(node["NodeID"])

    def stop(self) -> None:
        """See `NodeServices.stop`."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        self._locations = {}
        self._served = {}

    def _forget(self, node: str) -> None:
        self._actors.pop(node, None)
        self._locations.pop(node, None)
        self._served.pop(node, None)


CLEANUP_TIMEOUT = 5.0
"""Seconds that a cancelled function has to clean up."""


class RayTask:
    """A `RemoteTask` in a separate process, so its imports (torch, transformers) cost no other process memory."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        remote: Any = ray.remote(function)
        self._reference = remote.options(num_cpus=0, max_retries=1).remote(*arguments)

    def done(self) -> bool:
        """See `RemoteTask.done`."""
        return bool(ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Any:
        """See `RemoteTask.result`."""
        try:
            return ray.get(self._reference)
        except RayTaskError as error:
            # Ray's own error contains a trace of the worker. The original exception says more.
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except WorkerCrashedError:
            if folder := full_folder():
                raise OSError(errno.ENOSPC, "the disk of Ray's folder is full", folder) from None
            raise

    def cancel(self) -> None:
        """See `RemoteTask.cancel`. A function inside a library call does not see the interruption and is killed."""
        ray.cancel(self._reference, force=False)
        if not ray.wait([self._reference], timeout=CLEANUP_TIMEOUT)[0]:
            ray.cancel(self._reference, force=True)
            ray.wait([self._reference], timeout=CLEANUP_TIMEOUT)


def on_ray(shared: str = "") -> Cluster:
    """Return the connected Ray cluster, without an autoscaler.

    `shared` names a process on this machine that has the imports of ranks done, see `RayGang`. Functions are called in
    copies of it, unless it is gone.
    """
    plain = Cluster(
        functools.partial(RayGang, shared or secrets.token_hex(16)),
        smallest_offer,
        RayTask,
        RayNodeServices,
        host=ray.util.get_node_ip_address,
        machines=machines,
        drain=nodes.drain_idle,
    )
    if not shared:
        return plain

    def run_task(function: Any, *arguments: Any) -> RemoteTask:
        try:
            return CallInCopy(shared, function, *arguments)
        except OSError:
            return RayTask(function, *arguments)

    def call(function: Any, *arguments: Any) -> Any:
        try:
            return run_task(function, *arguments).result()
        except ChildProcessError:
            return function(*arguments)

    return dataclasses.replace(plain, run_task=run_task, call=call)

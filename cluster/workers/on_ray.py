"""The Ray cluster that this process is connected to, as a `Cluster`."""

from __future__ import annotations

import errno
import functools
import secrets
from typing import Any

import ray
from ray.exceptions import RayTaskError, WorkerCrashedError

from cluster.workers.cluster import Cluster, RemoteTask
from cluster.workers.machine import machines, smallest_offer
from cluster.workers.node_services import RayNodeServices
from cluster.workers.ray_gang import RayGang
from cluster.workers.ray_internals import full_folder
from cluster.workers.shared_imports import CallInCopy

CLEANUP_TIMEOUT = 5.0
"""Seconds that a cancelled function has to clean up."""


class RayTask:
    """A `RemoteTask` in a process of its own, so that what it imports (torch, transformers) weighs on nobody else."""

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
            # Ray's own text is a trace of the worker; what was raised there is the first cause.
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
    """The connected Ray cluster; it has no autoscaler to ask. `shared`: see `RayGang`; if it is given, the process of
    that name is on this machine, and functions are called in copies of it, unless it is gone."""
    if not shared:
        gang = functools.partial(RayGang, secrets.token_hex(16))
        return Cluster(gang, smallest_offer, RayTask, RayNodeServices, machines=machines)

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

    gang = functools.partial(RayGang, shared)
    return Cluster(gang, smallest_offer, run_task, RayNodeServices, call, machines=machines)

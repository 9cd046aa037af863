"""Choose the disk that a worker's pod requests, and what the copies of token shards may take of it."""

from __future__ import annotations

import dataclasses

from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.storage.uri import is_local

OWN_GIB = 10.0
"""GiB of a pod's disk for everything but copies of shards: logs, Ray's files, temporary files."""
COPIES_GIB = 20.0
"""GiB for copies of shards, unless `data.node_cache` or --disk-gib says otherwise."""


def with_disk(
    data: DataSpec, needs: ClusterNeeds, disk_gib: float | None, on_store: bool
) -> tuple[DataSpec, ClusterNeeds]:
    """Set the disk of a worker's pod, and `data.node_cache` to what fits on it.

    Unset, `data.node_cache` is half of the free space, and a pod sees the whole disk of its node.

    Args:
        data: the job's data.
        needs: what the job needs of its machines.
        disk_gib: the disk of a pod in GiB; None for the job's need.
        on_store: whether the run directory, and so the shards unless `data.cache` is set, is on a store. Shards on a
            mounted file system are not copied.

    Raises:
        InputError: the disk does not hold `data.node_cache`.
    """
    copied = not is_local(data.cache) if data.cache else on_store
    if not copied:
        return data, dataclasses.replace(needs, disk_gib=disk_gib or OWN_GIB)
    copies = data.node_cache
    if copies is None:
        copies = COPIES_GIB if disk_gib is None else max(disk_gib - OWN_GIB, disk_gib / 2)
    if disk_gib is not None and copies >= disk_gib:
        problem = f"copies of shards may take {copies:g} GiB of it (data.node_cache)"
        raise InputError(
            problem, f"--disk-gib {disk_gib:g}", f"give {copies + OWN_GIB:g}, or lower data.node_cache"
        )
    needs = dataclasses.replace(needs, disk_gib=disk_gib or copies + OWN_GIB)
    return data.model_copy(update={"node_cache": copies}), needs

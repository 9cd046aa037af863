"""Compute what a job needs of rendered machines, and refuse what they could never provide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cluster.workers.gang import Bundle
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec, Workers
from orchestrator.extensions.render.cluster_needs import ClusterNeeds, dns_name
from orchestrator.parallel.config import ParallelChoice, ParallelSpec

IMAGE = "training-orchestrator:"
"""The image that infra/Dockerfile builds, without its tag, cpu or cuda."""
CLOUDS = {"eks": "aws", "gke": "gcp", "aks": "azure"}
"""The cloud of each Kubernetes platform. Karpenter runs on several clouds."""


def needed_machines(
    name: str,
    resources: ResourceSpec,
    parallel: ParallelChoice,
    every: Workers,
    image: str | None,
    spot: bool,
    per_node: int | None,
    accelerators: tuple[str, ...],
) -> ClusterNeeds:
    """Return what a job needs of its machines.

    Args:
        name: the name of the job.
        resources: the workers of the job.
        parallel: how the job divides the model.
        every: how many workers the run has in all, those that do not train included.
        image: the container image, None for the default.
        spot: whether workers are spot machines.
        per_node: workers on a node, None for the size of a tensor-parallel group.
        accelerators: the device types.

    Raises:
        InputError: the options do not fit the job.
    """
    worker = resources.per_worker
    if accelerators and not worker.gpu:
        raise InputError(
            "the job asks for no GPU", "--accelerator", "set resources.per_worker.gpu=1 or leave it out"
        )
    if len(set(accelerators)) < len(accelerators):
        raise InputError("a device type is given twice", "--accelerator", "give each once")
    needs = ClusterNeeds(
        name=dns_name(name),
        image=_image(image, bool(worker.gpu)),
        min_workers=every.min,
        max_workers=every.max,
        cpu=worker.cpu,
        gpu=int(worker.gpu),
        memory_gib=0.0,
        per_node=_per_node(parallel, per_node),
        accelerators=accelerators,
        spot=spot,
        labels=worker.labels,
        notices=resources.notices in CLOUDS.values(),
    )
    one_value(resources, [label for label in worker.labels if not label.startswith("ray.io/")])
    groups = [group.labels for group in needs.groups()]
    known = Bundle(labels={key: wanted for key, wanted in worker.labels.items() if key in groups[0]})
    if not any(known.suits(labels) for labels in groups):
        where, hint = "resources.per_worker.labels", "change them, --spot or --accelerator"
        raise InputError("no rendered worker would have these labels", where, hint)
    return needs


def _image(image: str | None, gpu: bool) -> str:
    if image is None:
        return f"{IMAGE}{'cuda' if gpu else 'cpu'}"
    if gpu and image.endswith(f"{IMAGE}cpu"):
        hint = "give the one that infra/Dockerfile builds with --target cuda"
        raise InputError(f"the job needs GPUs, and {image} has no CUDA", "--image", hint)
    return image


def _per_node(parallel: Literal["auto"] | ParallelSpec, per_node: int | None) -> int:
    """Workers on a node. Raises InputError if a tensor-parallel group, which must share a node, would not fit."""
    tp = 1 if parallel == "auto" else parallel.tp
    if per_node is not None and per_node % tp:
        raise InputError(
            f"parallel.tp is {tp}, so those {tp} workers must share a node",
            "--per-node",
            f"give {tp} or leave it out",
        )
    return per_node or tp


def of_one_cloud(resources: ResourceSpec, cloud: str | None) -> None:
    """Raise InputError if the job asks for notices of another cloud. `cloud` None means any."""
    notices = resources.notices
    if cloud is not None and notices in CLOUDS.values() and notices != cloud:
        raise InputError(
            f"is {notices}, but the nodes run on {cloud}",
            "resources.notices",
            f"set it to {cloud} or null",
        )


def one_value(resources: ResourceSpec, labels: Iterable[str]) -> None:
    """Raise InputError if the job allows several values of one of these labels, since a group of nodes has one."""
    for label in labels:
        if resources.per_worker.labels.get(label, "").startswith("in("):
            where, hint = f"resources.per_worker.labels.{label}", "name one of them"
            raise InputError("no rendered node would have this label", where, hint)

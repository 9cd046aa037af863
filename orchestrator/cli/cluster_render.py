"""The commands cluster render: the machines of a job as files for Kubernetes and for Ray's cluster launcher.

The other commands of the group `cluster` are in `cluster_nodes`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import cluster_nodes as nodes
from orchestrator.cli.options import Job, Set, word, words
from orchestrator.cli.render_kuberay import kuberay
from orchestrator.cli.render_options import Accelerator, Image, Memory, PerNode, Spot, To, job_on_machines
from orchestrator.cli.render_skypilot import skypilot
from orchestrator.cli.render_slurm import slurm
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from cluster.render.needs import ClusterNeeds
    from orchestrator.config.spec import JobSpec

Region = Annotated[str | None, typer.Option(callback=word, help="the cloud's region")]
Zones = Annotated[str | None, typer.Option(callback=word, help="zones, comma-separated, tried in this order")]
Machine = Annotated[
    str | None,
    typer.Option(callback=word, help="machine type of the workers, with GPUs if the job needs them"),
]
HeadMachine = Annotated[str | None, typer.Option(callback=word, help="machine type of the head")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    cluster = typer.Typer(
        help="Where jobs run: nodes on this machine, files for Kubernetes and clouds.", no_args_is_help=True
    )
    for verb in (nodes.up, nodes.show, nodes.add, nodes.remove, nodes.down):
        cluster.command()(verb)
    render = typer.Typer(help="Write a job's machines as files.", no_args_is_help=True)
    for command in (kuberay, aws, gcp, azure, local, slurm, skypilot):
        render.command()(command)
    cluster.add_typer(render, name="render")
    app.add_typer(cluster, name="cluster")


def aws(
    job: Job,
    overrides: Set = None,
    to: To = None,
    image: Image = None,
    spot: Spot = True,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
    region: Region = None,
    zones: Zones = None,
    machine: Machine = None,
    head_machine: HeadMachine = None,
    profile: Annotated[str, typer.Option(help="instance profile that may reach the bucket")] = "",
) -> None:
    """A cluster on EC2 for `ray up`."""
    spec, needs = job_on_machines(job, overrides, image, spot, per_node, accelerator)
    _cloud("aws", spec, needs, to, memory, region, zones, machine, head_machine, profile=profile)


def gcp(
    job: Job,
    project: Annotated[str, typer.Option(callback=word, help="the project's id")],
    overrides: Set = None,
    to: To = None,
    image: Image = None,
    spot: Spot = True,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
    region: Region = None,
    zones: Zones = None,
    machine: Machine = None,
    head_machine: HeadMachine = None,
) -> None:
    """A cluster on Compute Engine for `ray up`."""
    spec, needs = job_on_machines(job, overrides, image, spot, per_node, accelerator)
    _cloud("gcp", spec, needs, to, memory, region, zones, machine, head_machine, project=project)


def azure(
    job: Job,
    overrides: Set = None,
    to: To = None,
    image: Image = None,
    spot: Spot = True,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
    region: Region = None,
    zones: Zones = None,
    machine: Machine = None,
    head_machine: HeadMachine = None,
    resource_group: Annotated[str, typer.Option(callback=word, help="the resource group")] = "ray-cluster",
) -> None:
    """A cluster on Azure for `ray up`."""
    spec, needs = job_on_machines(job, overrides, image, spot, per_node, accelerator)
    _cloud("azure", spec, needs, to, memory, region, zones, machine, head_machine, project=resource_group)


def local(
    job: Job,
    head_ip: Annotated[str, typer.Option(callback=word, help="the head's address")],
    worker_ip: Annotated[list[str], typer.Option(callback=words, help="a worker's address; repeat")],
    ssh_user: Annotated[str, typer.Option(callback=word, help="who logs in on all of them")] = "ubuntu",
    overrides: Set = None,
    to: To = None,
    image: Image = None,
) -> None:
    """A cluster on machines that are there already, for `ray up`."""
    from cluster.render.launcher import local as document
    from orchestrator.launch import rendering as rendered

    spec, needs = job_on_machines(job, overrides, image, False, None, None)
    if wanted := [label for label, value in needs.labels.items() if not value.startswith("!")]:
        where, hint = (
            f"resources.per_worker.labels.{wanted[0]}",
            "leave it out: all these machines are the job's",
        )
        raise InputError(
            "these machines are started without labels, so that no worker would fit", where, hint
        )
    if len({head_ip, *worker_ip}) <= len(worker_ip):
        raise InputError("an address is given twice", "--head-ip, --worker-ip", "give each machine once")
    rendered.write({"cluster.yaml": document(needs, head_ip, tuple(worker_ip), ssh_user)}, to)
    rendered.warn_of_local_paths(spec)
    rendered.warn_of_libraries(spec)


def _cloud(
    kind: str,
    spec: JobSpec,
    needs: ClusterNeeds,
    to: Path | None,
    memory: float | None,
    region: str | None,
    zones: str | None,
    machine: str | None,
    head_machine: str | None,
    project: str | None = None,
    profile: str | None = None,
) -> None:
    import dataclasses

    from cluster.render.launcher import DEFAULT_REGIONS, cloud
    from orchestrator.launch import rendering as rendered
    from orchestrator.launch.rendering_memory import with_host_memory
    from orchestrator.launch.rendering_needs import of_one_cloud

    of_one_cloud(spec, kind)
    if needs.gpu and machine is None:
        raise InputError(
            "the job needs GPUs and no machine type is given", "--machine", "name one that has them"
        )
    if region is not None and zones is None:
        raise InputError(
            f"region {region} is given without zones", "--zones", f"name the zones of {region} to use"
        )
    given = {
        "region": region,
        "zones": zones,
        "worker_machine": machine,
        "head_machine": head_machine,
        "project": project,
        "profile": profile,
    }
    few = ""
    if memory is not None:
        needs, few = with_host_memory(spec, needs, memory)
    place = dataclasses.replace(DEFAULT_REGIONS[kind], **{k: v for k, v in given.items() if v is not None})
    rendered.write({"cluster.yaml": cloud(kind, needs, place)}, to)
    rendered.warn_of_local_paths(spec)
    rendered.warn_of_libraries(spec)
    rendered.note(few)
    if kind == "aws" and needs.gpu:
        rendered.note(
            "Ray takes an AWS image of 2022: name one with a newer NVIDIA driver as node_config.ImageId"
        )

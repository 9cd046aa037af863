"""The commands `cluster render`: a job's machines as files for Kubernetes, Ray's launcher, Slurm and SkyPilot."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Job, Set, finite, word, words
from orchestrator.config.errors import InputError
from orchestrator.extensions.render.kubernetes_options import CheckOptions, KubernetesOptions
from orchestrator.extensions.render.options import (
    Image,
    Machines,
    OnDemandMachines,
    Overlay,
    PerNode,
    To,
    arguments,
    grouped,
    job_on_machines,
)

TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")
"""A time limit as Slurm writes it."""
app = typer.Typer(help="Write a job's machines as files.", no_args_is_help=True)


@app.command()
@grouped
def kuberay(
    job: Job,
    runs: Annotated[
        str, typer.Option(callback=word, help="folder of the runs: a URI, or pvc:CLAIM (ReadWriteMany)")
    ],
    image: Image,
    overrides: Set = None,
    to: To = None,
    overlay: Overlay = None,
    disk: Annotated[
        float | None,
        typer.Option(
            "--disk-gib",
            min=1,
            max=10**6,
            callback=finite,
            help="disk that a worker's pod requests, in GiB, most of it for copies of shards "
            "[default: 10, and data.node_cache or 20 for shards on a store]",
        ),
    ] = None,
    standing: Annotated[
        bool, typer.Option("--standing", help="write a RayCluster that waits for jobs, instead of a RayJob")
    ] = False,
    *,
    machines: OnDemandMachines,
    pods: KubernetesOptions,
    check: CheckOptions,
) -> None:
    """Write a RayJob (or a RayCluster), its NetworkPolicy and its ConfigMap for KubeRay.

    The keys of an overlay are the kinds of what is written, such as RayJob.
    """
    from orchestrator.config.spec import dump
    from orchestrator.extensions.render import manifests as rendered
    from orchestrator.extensions.render.disk import with_disk
    from orchestrator.extensions.render.kuberay import RAY_CLUSTER, RAY_JOB, kustomization, manifests
    from orchestrator.extensions.render.kubernetes import ask_server, cautions
    from orchestrator.extensions.render.memory import with_host_memory
    from orchestrator.extensions.render.needs import CLOUDS, of_one_cloud, one_value
    from orchestrator.extensions.render.node_selection import NODE_LABELS
    from orchestrator.extensions.render.overlay import overlay_kinds, read_overlay
    from orchestrator.extensions.render.pods import RUNS_FOLDER
    from orchestrator.storage.uri import check_uri

    spec, needs = job_on_machines(job, overrides, image, machines)
    claim = runs.removeprefix("pvc:") if runs.startswith("pvc:") else ""
    kubernetes = pods.checked(claim, bool(needs.gpu), check.kubeconfig)
    of_one_cloud(spec.resources, CLOUDS.get(kubernetes.platform))
    one_value(spec.resources, NODE_LABELS)
    if not claim:
        check_uri(runs, "--runs")
    if not claim and runs.split("://")[0] in (runs, "file", "local", "memory", "http", "https"):
        raise InputError(
            f"{runs!r} would be lost with the pod",
            "--runs",
            "give a URI, such as s3://bucket/runs, or pvc:CLAIM",
        )
    added = read_overlay(overlay)
    needs, memory_note = with_host_memory(spec, needs, machines.memory)
    data, needs = with_disk(spec.data, needs, disk, on_store=not claim)
    spec = spec.with_parts(data=data)
    base = RUNS_FOLDER if claim else rendered.no_password(runs, "--runs").rstrip("/")
    files = manifests(needs, kubernetes, dump(spec), f"{base}/{spec.name}", standing)
    files = overlay_kinds(files, added, overlay)
    try:
        rendered.check(files, check.crds)
    except (KeyError, TypeError, AttributeError) as error:
        if overlay is None:
            raise
        hint = "compare its structure with what is written without it"
        raise InputError(f"makes a manifest that is not complete ({error})", str(overlay), hint) from error
    if check.kubeconfig:
        ask_server(files, check.kubeconfig)
    other = RAY_JOB if standing else RAY_CLUSTER
    rendered.write({**files, "kustomization.yaml": kustomization(list(files))}, to, replaces=other)
    rendered.say_next("kubectl apply -k", to, "infra/README.md lists what the cluster needs first")
    rendered.warn_of_local_paths(spec, RUNS_FOLDER if claim else "")
    rendered.warn_of_libraries(spec, runs)
    rendered.note(memory_note)
    for caution in cautions(needs, kubernetes, runs):
        rendered.note(caution)


@dataclass(frozen=True)
class Render:
    """The arguments of a rendering for a cloud: the job, its image, and the target folder."""

    job: Job
    image: Image
    overrides: Set = None
    to: To = None
    overlay: Overlay = None


@dataclass(frozen=True)
class CloudOptions:
    """Options of every cloud: where its machines are, and which."""

    region: Annotated[str | None, typer.Option(callback=word, help="the cloud's region")] = None
    zones: Annotated[
        str | None, typer.Option(callback=word, help="zones, comma-separated, tried in this order")
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(callback=word, help="machine type of the workers, with GPUs if the job needs them"),
    ] = None
    head_machine: Annotated[str | None, typer.Option(callback=word, help="machine type of the head")] = None


@app.command()
@grouped
def aws(
    render: Render,
    profile: Annotated[str, typer.Option(help="instance profile that may reach the bucket")] = "",
    *,
    machines: Machines,
    cloud: CloudOptions,
) -> None:
    """A cluster on EC2 for `ray up`."""
    _render_cloud("aws", render, machines, cloud, {"profile": profile})


@app.command()
@grouped
def gcp(
    render: Render,
    project: Annotated[str, typer.Option(callback=word, help="the project's id")],
    *,
    machines: Machines,
    cloud: CloudOptions,
) -> None:
    """A cluster on Compute Engine for `ray up`."""
    _render_cloud("gcp", render, machines, cloud, {"project": project})


@app.command()
@grouped
def azure(
    render: Render,
    resource_group: Annotated[str, typer.Option(callback=word, help="the resource group")] = "ray-cluster",
    *,
    machines: Machines,
    cloud: CloudOptions,
) -> None:
    """A cluster on Azure for `ray up`."""
    _render_cloud("azure", render, machines, cloud, {"project": resource_group})


def _render_cloud(
    kind: str, render: Render, machines: Machines, cloud: CloudOptions, only_this_cloud: Mapping[str, str]
) -> None:
    """Write the file for a cloud. `only_this_cloud` has the fields of `CloudRegion` that are options of this cloud
    alone."""
    from orchestrator.extensions.render import manifests as rendered
    from orchestrator.extensions.render.launcher import DEFAULT_REGIONS
    from orchestrator.extensions.render.launcher import cloud as document
    from orchestrator.extensions.render.memory import with_host_memory
    from orchestrator.extensions.render.needs import of_one_cloud
    from orchestrator.extensions.render.overlay import merged, read_overlay

    spec, needs = job_on_machines(render.job, render.overrides, render.image, machines)
    of_one_cloud(spec.resources, kind)
    if needs.gpu and cloud.machine is None:
        raise InputError(
            "the job needs GPUs and no machine type is given", "--machine", "name one that has them"
        )
    if cloud.region is not None and cloud.zones is None:
        raise InputError(
            f"region {cloud.region} is given without zones",
            "--zones",
            f"name the zones of {cloud.region} to use",
        )
    added = read_overlay(render.overlay)
    fields = {
        "region": cloud.region,
        "zones": cloud.zones,
        "worker_machine": cloud.machine,
        "head_machine": cloud.head_machine,
        **only_this_cloud,
    }
    memory_note = ""
    if machines.memory is not None:
        needs, memory_note = with_host_memory(spec, needs, machines.memory)
    region = dataclasses.replace(DEFAULT_REGIONS[kind], **{k: v for k, v in fields.items() if v is not None})
    rendered.write({"cluster.yaml": merged(document(kind, needs, region), added)}, render.to)
    rendered.say_next("ray up", render.to and render.to / "cluster.yaml")
    rendered.warn_of_local_paths(spec)
    rendered.warn_of_libraries(spec)
    rendered.note(memory_note)
    if kind == "aws" and needs.gpu:
        rendered.note(
            "Ray takes an AWS image of 2022: name one with a newer NVIDIA driver as node_config.ImageId, by --overlay"
        )


@app.command()
def local(
    job: Job,
    image: Image,
    head_ip: Annotated[str, typer.Option(callback=word, help="the head's address")],
    worker_ip: Annotated[list[str], typer.Option(callback=words, help="a worker's address; repeat")],
    ssh_user: Annotated[str, typer.Option(callback=word, help="the ssh user of all machines")] = "ubuntu",
    overrides: Set = None,
    to: To = None,
    overlay: Overlay = None,
) -> None:
    """A cluster on machines that are there already, for `ray up`."""
    from orchestrator.extensions.render import manifests as rendered
    from orchestrator.extensions.render.launcher import local as document
    from orchestrator.extensions.render.overlay import merged, read_overlay

    spec, needs = job_on_machines(job, overrides, image, OnDemandMachines())
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
    cluster = document(needs, head_ip, tuple(worker_ip), ssh_user)
    rendered.write({"cluster.yaml": merged(cluster, read_overlay(overlay))}, to)
    rendered.say_next("ray up", to and to / "cluster.yaml")
    rendered.warn_of_local_paths(spec)
    rendered.warn_of_libraries(spec)


@app.command()
def slurm(
    job: Job,
    runs: Annotated[str, typer.Option(callback=word, help="folder of runs that all nodes see, or a URI")],
    overrides: Set = None,
    to: To = None,
    partition: Annotated[str | None, typer.Option(callback=word, help="the site's partition")] = None,
    account: Annotated[str | None, typer.Option(callback=word, help="account that pays")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="D-HH:MM:SS", callback=word, help="time limit of one allocation")
    ] = None,
    notice: Annotated[
        int, typer.Option(min=30, max=3600, help="seconds that the run has for a checkpoint before the end")
    ] = 180,
    per_node: PerNode = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", callback=words, help="another option of sbatch; repeat"),
    ] = None,
) -> None:
    """Write a batch file for `sbatch`. Slurm requeues it before its time ends, and the run resumes."""
    from orchestrator.config.paths import absolute
    from orchestrator.extensions.render import manifests
    from orchestrator.extensions.render.slurm import SlurmOptions, batch_file

    spec, needs = job_on_machines(job, overrides, None, OnDemandMachines(per_node=per_node))
    manifests.no_password(runs, "--runs")
    for option in more or ():
        manifests.no_password(option, "--sbatch")
    if time is not None and not TIME.fullmatch(time):
        raise InputError(
            "is not a time in Slurm's format", f"--time {time}", "write it as in 1-12:00:00 or 30"
        )
    manifests.refuse_labels(spec.resources, "Slurm", "allocation")
    run_dir = absolute(f"{runs.rstrip('/')}/{spec.name}", Path.cwd())
    command = [
        sys.executable,
        "-P",
        "-m",
        "orchestrator",
        "run",
        str(Path(job).absolute()),
        "--run-dir",
        run_dir,
    ]
    command += arguments(overrides)
    options = SlurmOptions(partition or "", account or "", time or "", notice, tuple(more or ()))
    text = batch_file(needs, options, command, manifests.MARK, sys.executable)
    manifests.write_text(f"{needs.name}.sbatch", text, to)
    manifests.say_next("sbatch", to and to / f"{needs.name}.sbatch")


@app.command()
@grouped
def skypilot(
    job: Job,
    runs: Annotated[str, typer.Option(callback=word, help="folder of the runs: a URI")],
    overrides: Set = None,
    to: To = None,
    overlay: Overlay = None,
    infra: Annotated[
        str | None, typer.Option(callback=word, help="cloud/region/zone or k8s/context [default: any]")
    ] = None,
    image: Annotated[str | None, typer.Option(callback=word, help="container image with the program")] = None,
    setup: Annotated[
        str, typer.Option(help="command that installs the program, without --image")
    ] = "pip install training-orchestrator",
    python: Annotated[str, typer.Option(callback=word, help="Python of the program on the nodes")] = "python",
    notice: Annotated[
        int,
        typer.Option(
            min=10, max=3600, help="seconds that the run has for a checkpoint before a machine goes"
        ),
    ] = 100,
    *,
    machines: Machines,
) -> None:
    """Write a task file for `sky jobs launch`. SkyPilot starts it again after a preemption, and the run resumes."""
    from orchestrator.extensions.render import manifests
    from orchestrator.extensions.render.memory import with_host_memory
    from orchestrator.extensions.render.overlay import merged, read_overlay
    from orchestrator.extensions.render.skypilot import TOKEN, SkyPilotOptions, task, task_text
    from orchestrator.storage.uri import check_uri, is_local

    spec, needs = job_on_machines(job, overrides, image, machines)
    manifests.no_password(runs, "--runs")
    manifests.no_password(setup, "--setup")
    check_uri(runs, "--runs")
    if is_local(runs) or runs.split("://")[0] in ("memory", "http", "https"):
        raise InputError(
            f"{runs!r} would be lost with the machine", "--runs", "give a URI, such as s3://bucket/runs"
        )
    manifests.refuse_labels(spec.resources, "SkyPilot", "task")
    if needs.gpu and not needs.accelerators:
        raise InputError(
            "the job needs GPUs, and SkyPilot asks which", "--accelerator", "name one, such as H100"
        )
    needs, memory_note = with_host_memory(spec, needs, machines.memory)
    run_dir, path = f"{runs.rstrip('/')}/{spec.name}", Path(job).absolute()
    command = [python, "-P", "-m", "orchestrator", "run", path.name, "--run-dir", run_dir]
    command += arguments(overrides)
    options = SkyPilotOptions(str(path.parent), infra or "", image or "", "" if image else setup, notice)
    document = merged(task(needs, options, command, python), read_overlay(overlay))
    text = f"{manifests.MARK}\n{task_text(document)}"
    manifests.write_text(f"{needs.name}.sky.yaml", text, to)
    manifests.warn_of_local_paths(spec)
    manifests.warn_of_libraries(spec, runs)
    manifests.note(memory_note)
    launch = f"sky jobs launch --secret {TOKEN}=$(openssl rand -hex 32)"
    manifests.say_next(launch, to and to / f"{needs.name}.sky.yaml")

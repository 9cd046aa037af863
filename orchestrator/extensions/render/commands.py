"""The commands `cluster render`: a job's machines as files for Kubernetes, Ray's launcher, Slurm and SkyPilot."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import Job, Set, finite, on_this_machine, word, words
from orchestrator.config.errors import InputError
from orchestrator.extensions.render.options import (
    Accelerator,
    Image,
    Memory,
    PerNode,
    Spot,
    To,
    arguments,
    job_on_machines,
)


def kuberay(
    job: Job,
    runs: Annotated[
        str, typer.Option(callback=word, help="folder of the runs: a URI, or pvc:CLAIM (ReadWriteMany)")
    ],
    image: Image,
    overrides: Set = None,
    to: To = None,
    spot: Spot = False,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
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
    namespace: Annotated[str, typer.Option(callback=word, help="Kubernetes namespace")] = "default",
    secret: Annotated[
        str, typer.Option(help="name of the Secret with auth_token, redis_password, ...")
    ] = "orchestrator-credentials",
    service_account: Annotated[str, typer.Option(help="service account of the pods, for cloud roles")] = "",
    queue: Annotated[str, typer.Option(help="kueue:LOCAL-QUEUE or volcano:QUEUE")] = "",
    redis: Annotated[
        str, typer.Option(help="host:port of the Redis that keeps the cluster's state")
    ] = "redis:6379",
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible store that is not AWS")] = "",
    platform: Annotated[
        str, typer.Option(help="eks, karpenter, gke or aks: how spot nodes are marked")
    ] = "eks",
    rdma: Annotated[
        str,
        typer.Option(
            metavar="RESOURCE[=N]",
            help="network cards of a pod with GPUs: rdma/ib, vpc.amazonaws.com/efa=32",
        ),
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="environment variable for head and workers, such as NCCL_DEBUG=INFO; repeat",
        ),
    ] = None,
    secret_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=KEY]",
            help="environment variable with its value from that key of the Secret; repeat",
        ),
    ] = None,
    pull_secret: Annotated[
        list[str] | None,
        typer.Option(callback=words, help="Secret that opens the images' registry; repeat"),
    ] = None,
    worker_image: Annotated[
        str | None,
        typer.Option(
            callback=word,
            help="image of the workers, such as training-orchestrator:cuda-rank [default: --image]",
        ),
    ] = None,
    submitter_image: Annotated[
        str | None,
        typer.Option(
            callback=word,
            help="image of the submitting pod, such as training-orchestrator:submitter [default: --image]",
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="number of new clusters after a failed one; the run resumes on each"
        ),
    ] = 3,
    keep_failed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10**8,
            metavar="SECONDS",
            help="seconds to keep the cluster of a failed job, by KubeRay's deletion rules [default: 600 for all]",
        ),
    ] = None,
    standing: Annotated[
        bool, typer.Option("--standing", help="write a RayCluster that waits for jobs, instead of a RayJob")
    ] = False,
    crds: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=on_this_machine, help="check against KubeRay's CRD files in DIR"),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=on_this_machine,
            help="check the files with kubectl against that API server; changes nothing",
        ),
    ] = None,
) -> None:
    """Write a RayJob (or a RayCluster), its NetworkPolicy and its ConfigMap for KubeRay."""
    from orchestrator.config.spec import dump
    from orchestrator.extensions.render import manifests as rendered
    from orchestrator.extensions.render.disk import with_disk
    from orchestrator.extensions.render.kuberay import KUEUE, RAY_CLUSTER, RAY_JOB, kustomization, manifests
    from orchestrator.extensions.render.kubernetes import (
        ask_server,
        cautions,
        check_queue,
        counted,
        redis_at,
        secret_settings,
        settings,
        store_at,
    )
    from orchestrator.extensions.render.memory import with_host_memory
    from orchestrator.extensions.render.needs import CLOUDS, of_one_cloud, one_value
    from orchestrator.extensions.render.node_selection import NODE_LABELS
    from orchestrator.extensions.render.pods import RUNS_FOLDER, SPOT, Kubernetes
    from orchestrator.storage.uri import check_uri

    spec, needs = job_on_machines(
        job, overrides, image=image, spot=spot, per_node=per_node, accelerators=accelerator
    )
    if platform not in SPOT:
        raise InputError(f"{platform!r} is not known", "--platform", f"choose one of {', '.join(SPOT)}")
    of_one_cloud(spec.resources, CLOUDS.get(platform))
    one_value(spec.resources, NODE_LABELS)
    if queue:
        check_queue(queue, namespace, kubeconfig)
    if queue.startswith(KUEUE) and keep_failed is not None:
        what = "Kueue takes only jobs whose cluster goes with them (shutdownAfterJobFinishes)"
        raise InputError(
            what, "--keep-failed", "leave it out: the cluster is kept for ten minutes; or use volcano"
        )
    cards, count = counted(rdma) if rdma else ("", 1)
    if cards and not needs.gpu:
        raise InputError(
            "the job asks for no GPU", "--rdma", "set resources.per_worker.gpu=1 or leave it out"
        )
    claim = runs.removeprefix("pvc:") if runs.startswith("pvc:") else ""
    if not claim:
        check_uri(runs, "--runs")
    if not claim and runs.split("://")[0] in (runs, "file", "local", "memory", "http", "https"):
        raise InputError(
            f"{runs!r} would be lost with the pod",
            "--runs",
            "give a URI, such as s3://bucket/runs, or pvc:CLAIM",
        )
    needs, memory_note = with_host_memory(spec, needs, memory)
    data, needs = with_disk(spec.data, needs, disk, on_store=not claim)
    spec = spec.with_parts(data=data)
    plain = settings(env or ())
    kubernetes = Kubernetes(
        namespace,
        secret,
        service_account=service_account,
        claim=claim,
        queue=queue,
        redis=redis_at(redis),
        endpoint=store_at(endpoint),
        platform=platform,
        rdma=cards,
        cards=count,
        env=plain,
        secret_env=secret_settings(secret_env or (), plain),
        worker_image=worker_image or "",
        submitter_image=submitter_image or "",
        retries=retries,
        keep_failed=keep_failed,
        pull_secrets=tuple(pull_secret or ()),
    )
    base = RUNS_FOLDER if claim else rendered.no_password(runs, "--runs").rstrip("/")
    files = manifests(needs, kubernetes, dump(spec), f"{base}/{spec.name}", standing)
    rendered.check(files, crds)
    if kubeconfig:
        ask_server(files, kubeconfig)
    other = RAY_JOB if standing else RAY_CLUSTER
    rendered.write({**files, "kustomization.yaml": kustomization(list(files))}, to, replaces=other)
    rendered.warn_of_local_paths(spec, RUNS_FOLDER if claim else "")
    rendered.warn_of_libraries(spec, runs)
    rendered.note(memory_note)
    for caution in cautions(needs, kubernetes, runs):
        rendered.note(caution)


def skypilot(
    job: Job,
    runs: Annotated[str, typer.Option(callback=word, help="folder of the runs: a URI")],
    overrides: Set = None,
    to: To = None,
    infra: Annotated[
        str | None, typer.Option(callback=word, help="cloud/region/zone or k8s/context [default: any]")
    ] = None,
    image: Annotated[str | None, typer.Option(callback=word, help="container image with the program")] = None,
    setup: Annotated[
        str, typer.Option(help="command that installs the program, without --image")
    ] = "pip install training-orchestrator",
    python: Annotated[str, typer.Option(callback=word, help="Python of the program on the nodes")] = "python",
    spot: Spot = True,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
    notice: Annotated[
        int,
        typer.Option(
            min=10, max=3600, help="seconds that the run has for a checkpoint before a machine goes"
        ),
    ] = 100,
) -> None:
    """Write a task file for `sky jobs launch`. SkyPilot starts it again after a preemption, and the run resumes."""
    from orchestrator.extensions.render import manifests
    from orchestrator.extensions.render.memory import with_host_memory
    from orchestrator.extensions.render.skypilot import TOKEN, SkyPilotOptions, task_file
    from orchestrator.storage.uri import check_uri, is_local

    spec, needs = job_on_machines(
        job, overrides, image=image, spot=spot, per_node=per_node, accelerators=accelerator
    )
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
    needs, memory_note = with_host_memory(spec, needs, memory)
    place, path = f"{runs.rstrip('/')}/{spec.name}", Path(job).absolute()
    command = [python, "-P", "-m", "orchestrator", "run", path.name, "--run-dir", place]
    command += arguments(overrides)
    options = SkyPilotOptions(str(path.parent), infra or "", image or "", "" if image else setup, notice)
    text = f"{manifests.MARK}\n{task_file(needs, options, command, python)}"
    manifests.write_text(f"{needs.name}.sky.yaml", text, to)
    manifests.warn_of_local_paths(spec)
    manifests.warn_of_libraries(spec, runs)
    manifests.note(memory_note)
    if to is not None:
        secret = f"--secret {TOKEN}=$(openssl rand -hex 32)"
        manifests.note(f"start it by: sky jobs launch {secret} {needs.name}.sky.yaml")


TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")


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

    spec, needs = job_on_machines(
        job, overrides, image=None, spot=False, per_node=per_node, accelerators=None
    )
    manifests.no_password(runs, "--runs")
    for option in more or ():
        manifests.no_password(option, "--sbatch")
    if time is not None and not TIME.fullmatch(time):
        raise InputError("is no time of Slurm", f"--time {time}", "write it as in 1-12:00:00 or 30")
    manifests.refuse_labels(spec.resources, "Slurm", "allocation")
    place = absolute(f"{runs.rstrip('/')}/{spec.name}", Path.cwd())
    command = [
        sys.executable,
        "-P",
        "-m",
        "orchestrator",
        "run",
        str(Path(job).absolute()),
        "--run-dir",
        place,
    ]
    command += arguments(overrides)
    options = SlurmOptions(partition or "", account or "", time or "", notice, tuple(more or ()))
    text = batch_file(needs, options, command, manifests.MARK, sys.executable)
    manifests.write_text(f"{needs.name}.sbatch", text, to)


Region = Annotated[str | None, typer.Option(callback=word, help="the cloud's region")]
Zones = Annotated[str | None, typer.Option(callback=word, help="zones, comma-separated, tried in this order")]
Machine = Annotated[
    str | None,
    typer.Option(callback=word, help="machine type of the workers, with GPUs if the job needs them"),
]
HeadMachine = Annotated[str | None, typer.Option(callback=word, help="machine type of the head")]


def aws(
    profile: Annotated[str, typer.Option(help="instance profile that may reach the bucket")] = "",
) -> dict[str, str]:
    """A cluster on EC2 for `ray up`."""
    return {"profile": profile}


def gcp(
    project: Annotated[str, typer.Option(callback=word, help="the project's id")],
) -> dict[str, str]:
    """A cluster on Compute Engine for `ray up`."""
    return {"project": project}


def azure(
    resource_group: Annotated[str, typer.Option(callback=word, help="the resource group")] = "ray-cluster",
) -> dict[str, str]:
    """A cluster on Azure for `ray up`."""
    return {"project": resource_group}


def local(
    job: Job,
    image: Image,
    head_ip: Annotated[str, typer.Option(callback=word, help="the head's address")],
    worker_ip: Annotated[list[str], typer.Option(callback=words, help="a worker's address; repeat")],
    ssh_user: Annotated[str, typer.Option(callback=word, help="the ssh user of all machines")] = "ubuntu",
    overrides: Set = None,
    to: To = None,
) -> None:
    """A cluster on machines that are there already, for `ray up`."""
    from orchestrator.extensions.render import manifests as rendered
    from orchestrator.extensions.render.launcher import local as document

    spec, needs = job_on_machines(job, overrides, image=image, spot=False, per_node=None, accelerators=None)
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


def _render_cloud(
    kind: str,
    own: Mapping[str, str],
    *,
    job: Job,
    image: Image,
    overrides: Set = None,
    to: To = None,
    spot: Spot = True,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
    region: Region = None,
    zones: Zones = None,
    machine: Machine = None,
    head_machine: HeadMachine = None,
) -> None:
    """Write the file for a cloud. `own` has fields of `CloudRegion` that only this cloud has options for."""
    import dataclasses

    from orchestrator.extensions.render import manifests as rendered
    from orchestrator.extensions.render.launcher import DEFAULT_REGIONS, cloud
    from orchestrator.extensions.render.memory import with_host_memory
    from orchestrator.extensions.render.needs import of_one_cloud

    spec, needs = job_on_machines(
        job, overrides, image=image, spot=spot, per_node=per_node, accelerators=accelerator
    )
    of_one_cloud(spec.resources, kind)
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
        **own,
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


def _cloud_command(own: Callable[..., dict[str, str]]) -> Callable[..., None]:
    """Return the command of a cloud: it has the options of all clouds, and those of `own`."""
    special = inspect.signature(own, eval_str=True).parameters
    shared = [
        parameter
        for parameter in inspect.signature(_render_cloud, eval_str=True).parameters.values()
        if parameter.name not in ("kind", "own")
    ]

    def command(**given: Any) -> None:
        fields = own(**{name: given.pop(name) for name in special})
        _render_cloud(own.__name__, fields, **given)

    parameters = [*shared, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in special.values())]
    command.__name__ = own.__name__
    command.__doc__ = own.__doc__
    # typer reads options from the signature and the annotations.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


app = typer.Typer(help="Write a job's machines as files.", no_args_is_help=True)
_CLOUDS: tuple[Callable[..., dict[str, str]], ...] = (aws, gcp, azure)
_COMMANDS: tuple[Callable[..., None], ...] = (
    kuberay,
    *(_cloud_command(each) for each in _CLOUDS),
    local,
    slurm,
    skypilot,
)
for _command in _COMMANDS:
    app.command()(_command)

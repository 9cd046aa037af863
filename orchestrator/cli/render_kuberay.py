"""The command cluster render kuberay: manifests for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Job, Set, on_this_machine, word
from orchestrator.cli.render_options import Accelerator, Image, Memory, PerNode, Spot, To, job_on_machines
from orchestrator.config.errors import InputError


def kuberay(
    job: Job,
    runs: Annotated[
        str, typer.Option(callback=word, help="where runs are kept: a URI, or pvc:CLAIM (ReadWriteMany)")
    ],
    overrides: Set = None,
    to: To = None,
    image: Image = None,
    spot: Spot = False,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
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
        typer.Option(metavar="NAME=VALUE", help="for head and workers, such as NCCL_DEBUG=INFO; repeat"),
    ] = None,
    secret_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=KEY]", help="the same, its value from that key of the Secret; repeat"),
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
        int, typer.Option(min=0, max=1000, help="new clusters, on which the run goes on, after a failed one")
    ] = 3,
    keep_failed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10**8,
            metavar="SECONDS",
            help="keep the cluster of a failed job so long, by KubeRay's deletion rules [default: 600 for all]",
        ),
    ] = None,
    crds: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=on_this_machine, help="check against KubeRay's CRD files in DIR"),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=on_this_machine,
            help="have kubectl ask that API server, which changes nothing",
        ),
    ] = None,
) -> None:
    """RayJob, RayCluster, NetworkPolicy and ConfigMap for KubeRay."""
    from cluster.render.kuberay import KUEUE, kustomization, manifests
    from cluster.render.node_selection import ACCELERATOR, NODE_LABELS, accelerator_label
    from cluster.render.pods import RUNS_FOLDER, SPOT, Kubernetes
    from orchestrator.config.spec import dump
    from orchestrator.launch import rendering as rendered
    from orchestrator.launch.rendering_kubernetes import (
        ask_server,
        check_queue,
        counted,
        redis_at,
        secret_settings,
        settings,
        store_at,
    )
    from orchestrator.launch.rendering_memory import with_host_memory
    from orchestrator.launch.rendering_needs import CLOUDS, of_one_cloud, one_value
    from orchestrator.storage.uri import check_uri

    spec, needs = job_on_machines(job, overrides, image, spot, per_node, accelerator)
    if platform not in SPOT:
        raise InputError(f"{platform!r} is not known", "--platform", f"choose one of {', '.join(SPOT)}")
    of_one_cloud(spec, CLOUDS.get(platform))
    one_value(spec, NODE_LABELS)
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
    plain = settings(env or ())
    kubernetes = Kubernetes(
        namespace, secret, service_account, claim, queue, redis_at(redis), store_at(endpoint), platform, cards, count,
        plain, secret_settings(secret_env or (), plain), worker_image or "",
        submitter_image or "", retries, keep_failed,
    )  # fmt: skip
    base = RUNS_FOLDER if claim else rendered.no_password(runs, "--runs").rstrip("/")
    files = manifests(needs, kubernetes, dump(spec), f"{base}/{spec.name}")
    rendered.check(files, crds)
    if kubeconfig:
        ask_server(files, kubeconfig)
    rendered.write({**files, "kustomization.yaml": kustomization(list(files))}, to)
    rendered.warn_of_local_paths(spec, RUNS_FOLDER if claim else "")
    rendered.warn_of_libraries(spec, runs)
    rendered.note(memory_note)
    if needs.notices:
        rendered.note(
            "resources.notices lets the pods ask their node's metadata, which hold its credentials; on EKS its hop "
            "limit must be 2"
        )
    kinds = [group.accelerator for group in needs.groups() if group.accelerator]
    if unknown := [kind for kind in kinds if accelerator_label(kind, platform)[0] == ACCELERATOR]:
        rendered.note(
            f"the nodes must carry the label {ACCELERATOR}={' or '.join(unknown)}, as the pods select them by it"
        )
    if keep_failed is not None:
        rendered.note("KubeRay's operator must have the feature gate RayJobDeletionPolicy for --keep-failed")

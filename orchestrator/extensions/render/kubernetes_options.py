"""The options of `cluster render kuberay`: what the manifests refer to in a Kubernetes cluster, and how jobs end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import on_this_machine, word, words
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.extensions.render.pods import Kubernetes


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of the pods and of the objects that they refer to. See `Kubernetes` for what each becomes."""

    namespace: Annotated[str, typer.Option(callback=word, help="Kubernetes namespace")] = "default"
    secret: Annotated[str, typer.Option(help="name of the Secret with auth_token, redis_password, ...")] = (
        "orchestrator-credentials"
    )
    service_account: Annotated[str, typer.Option(help="service account of the pods, for cloud roles")] = ""
    queue: Annotated[str, typer.Option(help="kueue:LOCAL-QUEUE or volcano:QUEUE")] = ""
    redis: Annotated[str, typer.Option(help="host:port of the Redis that keeps the cluster's state")] = (
        "redis:6379"
    )
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible store that is not AWS")] = ""
    platform: Annotated[str, typer.Option(help="eks, karpenter, gke or aks: how spot nodes are marked")] = (
        "eks"
    )
    rdma: Annotated[
        str,
        typer.Option(
            metavar="RESOURCE[=N]",
            help="network cards of a pod with GPUs: rdma/ib, vpc.amazonaws.com/efa=32",
        ),
    ] = ""
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="environment variable for head and workers, such as NCCL_DEBUG=INFO; repeat",
        ),
    ] = None
    secret_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=KEY]",
            help="environment variable with its value from that key of the Secret; repeat",
        ),
    ] = None
    pull_secret: Annotated[
        list[str] | None,
        typer.Option(callback=words, help="Secret that opens the images' registry; repeat"),
    ] = None
    worker_image: Annotated[
        str | None,
        typer.Option(
            callback=word,
            help="image of the workers, such as training-orchestrator:cuda-rank [default: --image]",
        ),
    ] = None
    submitter_image: Annotated[
        str | None,
        typer.Option(
            callback=word,
            help="image of the submitting pod, such as training-orchestrator:submitter [default: --image]",
        ),
    ] = None
    retries: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="number of new clusters after a failed one; the run resumes on each"
        ),
    ] = 3
    keep_failed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10**8,
            metavar="SECONDS",
            help="seconds to keep the cluster of a failed job, by KubeRay's deletion rules [default: 600 for all]",
        ),
    ] = None

    def checked(self, claim: str, has_gpu: bool, kubeconfig: Path | None) -> Kubernetes:
        """Return the options for the manifests. Raises InputError if one is wrong, or has a credential.

        Args:
            claim: the volume claim of the runs, empty without one.
            has_gpu: whether the job's workers have GPUs.
            kubeconfig: names the API server that knows the queue; None to skip that check.
        """
        from orchestrator.extensions.render.kuberay import KUEUE
        from orchestrator.extensions.render.kubernetes import (
            check_queue,
            counted,
            redis_at,
            secret_settings,
            settings,
            store_at,
        )
        from orchestrator.extensions.render.pods import SPOT, Kubernetes

        if self.platform not in SPOT:
            hint = f"choose one of {', '.join(SPOT)}"
            raise InputError(f"{self.platform!r} is not known", "--platform", hint)
        if self.queue:
            check_queue(self.queue, self.namespace, kubeconfig)
        if self.queue.startswith(KUEUE) and self.keep_failed is not None:
            problem = "Kueue takes only jobs whose cluster goes with them (shutdownAfterJobFinishes)"
            hint = "leave it out: the cluster is kept for ten minutes; or use volcano"
            raise InputError(problem, "--keep-failed", hint)
        cards, count = counted(self.rdma) if self.rdma else ("", 1)
        if cards and not has_gpu:
            hint = "set resources.per_worker.gpu=1 or leave it out"
            raise InputError("the job asks for no GPU", "--rdma", hint)
        plain = settings(self.env or ())
        return Kubernetes(
            namespace=self.namespace,
            secret=self.secret,
            service_account=self.service_account,
            claim=claim,
            queue=self.queue,
            redis=redis_at(self.redis),
            endpoint=store_at(self.endpoint),
            platform=self.platform,
            rdma=cards,
            cards=count,
            env=plain,
            secret_env=secret_settings(self.secret_env or (), plain),
            worker_image=self.worker_image or "",
            submitter_image=self.submitter_image or "",
            retries=self.retries,
            keep_failed=self.keep_failed,
            pull_secrets=tuple(self.pull_secret or ()),
        )


@dataclass(frozen=True)
class CheckOptions:
    """Options that check the manifests before they are written."""

    crds: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=on_this_machine, help="check against KubeRay's CRD files in DIR"),
    ] = None
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=on_this_machine,
            help="check the files with kubectl against that API server; changes nothing",
        ),
    ] = None

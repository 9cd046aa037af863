"""Make the pod templates of a Ray cluster: head, workers and submitter, without privileges and without secrets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.extensions.render.cluster_needs import ClusterNeeds, NodeGroup
from orchestrator.extensions.render.node_selection import node_selection

Manifest = dict[str, Any]

RUN_LABEL = "training-orchestrator/run"
"""The label of every pod of a run, by which the network policy selects them."""
COMPONENT_LABEL = "app.kubernetes.io/component"
"""The label that tells head and workers apart, by which infra/monitoring selects them."""
SPOT_TAINT = "training-orchestrator/spot"
"""The taint of the spot nodes of infra/terraform on platforms whose own key cannot be a taint."""
USER = 1000
"""The user id of the image, see infra/Dockerfile."""
JOB_FOLDER, RUNS_FOLDER = "/etc/orchestrator", "/runs"
GCS = 6379
CLIENT = 10001
DASHBOARD = 8265
METRICS = 8080
AGENT = 52365
AUTOSCALER_METRICS, DASHBOARD_METRICS = 44217, 44227

HEAD_CPU, HEAD_MEMORY, HEAD_DISK = {"requests": "1", "limits": "2"}, "8Gi", "10Gi"
"""The size of a head, which runs no ranks. Its memory is never shared; a second CPU is used when it is free."""
AUTOSCALER_CPU, AUTOSCALER_MEMORY = {"requests": "100m", "limits": "500m"}, "1Gi"
"""The size of the autoscaler's container in the head's pod."""

SHARED_MEMORY_GIB = 8
"""The size of /dev/shm, which NCCL uses within a node. It counts as the pod's memory; the default is 64 MB."""

EFA = "vpc.amazonaws.com/efa"
"""The resource of AWS's Elastic Fabric Adapter."""
EFA_PAGES = "5120Mi"
"""The amount of huge pages that its driver needs, and that Amazon's accelerated images reserve (EKS manual)."""
EFA_SETTINGS = {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"}
"""Settings for libfabric: use this provider only, and allow forks, because rank processes are forked."""

SPOT = {
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "gke": ("cloud.google.com/gke-spot", "true"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
"""The label (and taint) of a spot node by platform, from the platform's manual."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "aws_access_key_id",
    "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
    "MLFLOW_TRACKING_USERNAME": "mlflow_tracking_username",
    "MLFLOW_TRACKING_PASSWORD": "mlflow_tracking_password",
}
"""Environment variables and their keys in the Secret. All are optional, because a service account may replace them."""


@dataclass(frozen=True)
class Kubernetes:
    """The namespace of the manifests and the objects that they refer to.

    `secret` names the Secret with auth_token, redis_password and, where needed, the keys of `CREDENTIALS`;
    `claim` a ReadWriteMany volume claim mounted at /runs; `queue` is `kueue:NAME`, `volcano:NAME` or empty;
    `platform` a key of `SPOT`. `rdma` is the resource by which a device plugin gives a pod with GPUs `cards` of the
    network's cards, such as rdma/ib or vpc.amazonaws.com/efa; without it NCCL goes through TCP between nodes. `env` are
    further environment variables of head and workers, such as NCCL's, and `secret_env` those whose values are in the
    Secret, each with its key there. `worker_image` is that of the workers and
    `submitter_image` that of the pod that submits, empty for the run's own. After `retries` failures the job counts as
    failed; `keep_failed` is for how many seconds the cluster of a failed one is kept, None for as long as that of one
    that is done. `pull_secrets` name the Secrets that open the registry of the images.
    """

    namespace: str = "default"
    secret: str = "orchestrator-credentials"
    service_account: str = ""
    claim: str = ""
    queue: str = ""
    redis: str = "redis:6379"
    endpoint: str = ""
    platform: str = "eks"
    rdma: str = ""
    cards: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict)
    worker_image: str = ""
    submitter_image: str = ""
    retries: int = 3
    keep_failed: int | None = None
    pull_secrets: tuple[str, ...] = ()


def head(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """Return the head's pod template: on an on-demand node, without ranks, with the job file mounted."""
    ports = {
        "gcs-server": GCS,
        "client": CLIENT,
        "dashboard": DASHBOARD,
        "metrics": METRICS,
        "as-metrics": AUTOSCALER_METRICS,
        "dash-metrics": DASHBOARD_METRICS,
    }
    container = _container("ray-head", needs, kubernetes, {"memory": HEAD_MEMORY}, ports)
    for kind, cpu in HEAD_CPU.items():
        container["resources"][kind]["cpu"] = cpu
    container["resources"]["requests"]["ephemeral-storage"] = HEAD_DISK
    container["volumeMounts"].append({"name": "job", "mountPath": JOB_FOLDER, "readOnly": True})
    spec = _pod(kubernetes, container)
    spec["volumes"].append({"name": "job", "configMap": {"name": f"{needs.name}-job"}})
    if needs.spot:
        key, value = SPOT[kubernetes.platform]
        term = {"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec["affinity"] = {"nodeAffinity": required}
    return {"metadata": {"labels": {**labels(needs), COMPONENT_LABEL: "head"}}, "spec": spec}


def worker(needs: ClusterNeeds, group: NodeGroup, kubernetes: Kubernetes) -> Manifest:
    """Return the pod template of a worker group, with its devices and the nodes that it may run on."""
    resources = {"cpu": quantity(group.cpu), "memory": f"{math.ceil(group.memory_gib * 1024)}Mi"}
    if group.gpu:
        resources["nvidia.com/gpu"] = str(group.gpu)
        if kubernetes.rdma:
            resources[kubernetes.rdma] = str(kubernetes.cards)
        if kubernetes.rdma == EFA:
            resources["hugepages-2Mi"] = EFA_PAGES
    settings = EFA_SETTINGS if group.gpu and kubernetes.rdma == EFA else {}
    container = _container(
        "ray-worker",
        needs,
        kubernetes=kubernetes,
        resources=resources,
        ports={"metrics": METRICS},
        settings=settings,
    )
    container["image"] = kubernetes.worker_image or needs.image
    if group.disk_gib:
        # Without a limit: a download or an export may take more for a moment, where the node has it.
        container["resources"]["requests"]["ephemeral-storage"] = f"{math.ceil(group.disk_gib)}Gi"
    spec = _pod(kubernetes, container)
    spec["automountServiceAccountToken"] = False  # only the head may scale the cluster
    key, value = SPOT[kubernetes.platform]
    spec |= node_selection(group, (key, value), kubernetes.platform)
    if group.spot:
        spec["tolerations"] += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"},
            {"key": SPOT_TAINT, "operator": "Exists", "effect": "NoSchedule"},
        ]
    if group.gpu:
        spec["volumes"].append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB}Gi"}}
        )
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
        spec["tolerations"].append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    return {"metadata": {"labels": {**labels(needs), COMPONENT_LABEL: "worker"}}, "spec": spec}


def submitter(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """Return the template of the pod that submits the command and shows its output.

    It needs only Ray's command. KubeRay gives it the token.
    """
    resources = {"cpu": "250m", "memory": "512Mi"}
    container = {
        "name": "ray-job-submitter",
        "image": kubernetes.submitter_image or needs.image,
        "securityContext": _unprivileged_container(),
        "resources": {"requests": resources, "limits": resources},
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "securityContext": _unprivileged_pod(),
        "containers": [container],
        **_pull_secrets(kubernetes),
    }
    spec["automountServiceAccountToken"] = False
    return {"metadata": {"labels": labels(needs)}, "spec": spec}


def labels(needs: ClusterNeeds) -> dict[str, str]:
    """Return the labels of all objects of a run."""
    return {RUN_LABEL: needs.name, "app.kubernetes.io/part-of": "training-orchestrator"}


def reference(secret: str, key: str, optional: bool = False) -> Manifest:
    """Return a `valueFrom` that refers to a key of a Secret."""
    result: Manifest = {"name": secret, "key": key}
    return {"secretKeyRef": {**result, "optional": True} if optional else result}


def quantity(amount: float) -> str:
    """Return a Kubernetes quantity without a unit: an integer if possible, else thousandths, rounded up."""
    return f"{amount:.0f}" if amount == int(amount) else f"{math.ceil(round(amount * 1000, 6))}m"


def autoscaler() -> Manifest:
    """Return the options of the autoscaler: version 2, and idle nodes end after a minute."""
    return {
        "version": "v2",
        "upscalingMode": "Default",
        "idleTimeoutSeconds": 60,
        "resources": {
            kind: {"cpu": cpu, "memory": AUTOSCALER_MEMORY} for kind, cpu in AUTOSCALER_CPU.items()
        },
        "securityContext": _unprivileged_container(),
    }


def _container(
    name: str,
    needs: ClusterNeeds,
    kubernetes: Kubernetes,
    resources: dict[str, str],
    ports: dict[str, int],
    settings: Mapping[str, str] | None = None,
) -> Manifest:
    # One request checks the raylet and, on the head, the GCS; Ray requires no token for it.
    probe = {"httpGet": {"path": "/api/healthz", "port": AGENT}, "periodSeconds": 10, "timeoutSeconds": 5}
    container: Manifest = {
        "name": name,
        "image": needs.image,
        "env": [
            {"name": variable, **source} for variable, source in _env(kubernetes, settings or {}).items()
        ],
        "ports": [{"name": k, "containerPort": v} for k, v in ports.items()],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": _unprivileged_container(),
        "startupProbe": {**probe, "failureThreshold": 30},
        "readinessProbe": {**probe, "failureThreshold": 3},
        "livenessProbe": {**probe, "failureThreshold": 12},
        "volumeMounts": [],
    }
    if kubernetes.claim:
        container["volumeMounts"].append({"name": "runs", "mountPath": RUNS_FOLDER})
    return container


def _env(kubernetes: Kubernetes, settings: Mapping[str, str]) -> dict[str, Manifest]:
    """The environment of a container. The user's variables override `settings` and all others."""
    secret = kubernetes.secret
    result: dict[str, Manifest] = {
        variable: {"valueFrom": reference(secret, key, optional=True)}
        for variable, key in CREDENTIALS.items()
    }
    store = {"AWS_ENDPOINT_URL": kubernetes.endpoint} if kubernetes.endpoint else {}
    result |= {
        variable: {"value": value} for variable, value in {**store, **settings, **kubernetes.env}.items()
    }
    return result | {
        variable: {"valueFrom": reference(secret, key)} for variable, key in kubernetes.secret_env.items()
    }


def _pod(kubernetes: Kubernetes, container: Manifest) -> Manifest:
    spec: Manifest = {
        "restartPolicy": "Never",  # the autoscaler's second version replaces pods itself
        "terminationGracePeriodSeconds": 110,  # what a spot notice of two minutes leaves for a commit
        "securityContext": _unprivileged_pod(),
        "tolerations": [],
        "volumes": [],
        "containers": [container],
        **_pull_secrets(kubernetes),
    }
    if kubernetes.service_account:
        spec["serviceAccountName"] = kubernetes.service_account
    if kubernetes.claim:
        spec["volumes"].append({"name": "runs", "persistentVolumeClaim": {"claimName": kubernetes.claim}})
    return spec


def _pull_secrets(kubernetes: Kubernetes) -> Manifest:
    names = [{"name": name} for name in kubernetes.pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def _unprivileged_pod() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _unprivileged_container() -> Manifest:
    return {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }

"""RayCluster, RayJob and what they need, for KubeRay 1.6 and later (token authentication by `authOptions`)."""

from __future__ import annotations

import shlex

from cluster.render.needs import ClusterNeeds, NodeGroup
from cluster.render.pods import (
    AUTOSCALER_METRICS,
    DASHBOARD,
    DASHBOARD_METRICS,
    JOB_FOLDER,
    METRICS,
    RUN_LABEL,
    Kubernetes,
    Manifest,
    autoscaler,
    head,
    labels,
    reference,
    submitter,
    worker,
)
from cluster.render.selection import ray_labels

KUEUE, VOLCANO = "kueue:", "volcano:"
METADATA = "169.254.169.254/32"
"""Where a node's metadata are on AWS, Google Cloud and Azure."""


def manifests(needs: ClusterNeeds, kubernetes: Kubernetes, job_file: str, runs: str) -> dict[str, Manifest]:
    """File name to manifest. `job_file` is the job's text, `runs` the URI of its run directory.

    `rayjob.yaml` trains and takes its cluster down; `raycluster.yaml` is the same cluster, left standing.
    """
    return {
        "configmap.yaml": _config_map(needs, kubernetes, job_file),
        "networkpolicy.yaml": network_policy(needs, kubernetes),
        "rayjob.yaml": ray_job(needs, kubernetes, runs),
        "raycluster.yaml": ray_cluster(needs, kubernetes),
    }


def ray_cluster(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """The cluster alone, for `run --address` and several jobs."""
    return _object("ray.io/v1", "RayCluster", needs, kubernetes, _cluster_spec(needs, kubernetes))


def ray_job(needs: ClusterNeeds, kubernetes: Kubernetes, runs: str) -> Manifest:
    """The cluster and the command, gone a while after the end. Applied again, it goes on from the last commit."""
    command = ["orchestrator", "run", f"{JOB_FOLDER}/job.yaml", "--address", "auto", "--run-dir", runs]
    spec: Manifest = {
        "entrypoint": shlex.join(command),
        "submissionMode": "K8sJobMode",
        # A run that stopped at its ceiling exits with 3: a second try would buy another cluster for nothing.
        "backoffLimit": 0,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": _cluster_spec(needs, kubernetes),
        "submitterPodTemplate": submitter(needs, kubernetes),
    }
    return _object("ray.io/v1", "RayJob", needs, kubernetes, spec)


def network_policy(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """The run's pods talk among themselves; only KubeRay and Prometheus come in; the node's metadata, and with them its
    credentials, stay out unless the job asks there for notices."""
    own = {"podSelector": {"matchLabels": {RUN_LABEL: needs.name}}}
    scrape = [_port(p) for p in (METRICS, AUTOSCALER_METRICS, DASHBOARD_METRICS)]
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    outside = {"cidr": "0.0.0.0/0"} | ({} if needs.notices else {"except": [METADATA]})
    spec: Manifest = {
        "podSelector": {"matchLabels": {RUN_LABEL: needs.name}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [own]},
            {"from": [operator], "ports": [_port(DASHBOARD)]},
            {"from": [monitoring], "ports": scrape},
        ],
        "egress": [{"to": [own]}, {"to": [{"namespaceSelector": {}}]}, {"to": [{"ipBlock": outside}]}],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", needs, kubernetes, spec, queued=False)


def kustomization(files: list[str]) -> Manifest:
    """What `kubectl apply -k` takes: all but the cluster left standing."""
    resources = [name for name in files if name != "raycluster.yaml"]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    }


def _cluster_spec(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    return {
        "rayVersion": needs.ray_version,
        "authOptions": {"mode": "token", "secretName": kubernetes.secret},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": autoscaler(),
        "gcsFaultToleranceOptions": {
            "redisAddress": kubernetes.redis,
            "redisPassword": {"valueFrom": reference(kubernetes.secret, "redis_password")},
        },
        "headGroupSpec": {
            # The pod's own network is the trust boundary here: the policy above admits nobody else.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": head(needs, kubernetes),
        },
        "workerGroupSpecs": [_worker_group(needs, group, kubernetes) for group in needs.groups()],
    }


def _worker_group(needs: ClusterNeeds, group: NodeGroup, kubernetes: Kubernetes) -> Manifest:
    return {
        "groupName": group.name,
        "minReplicas": group.min,
        "replicas": group.min,
        "maxReplicas": group.max,
        "labels": ray_labels(group),
        "rayStartParams": {},
        "template": worker(needs, group, kubernetes),
    }


def _config_map(needs: ClusterNeeds, kubernetes: Kubernetes, job_file: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(needs, kubernetes, f"{needs.name}-job"),
        "data": {"job.yaml": job_file},
    }


def _object(
    version: str, kind: str, needs: ClusterNeeds, kubernetes: Kubernetes, spec: Manifest, queued: bool = True
) -> Manifest:
    metadata = _metadata(needs, kubernetes, needs.name)
    if queued and kubernetes.queue.startswith(KUEUE):
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = kubernetes.queue.removeprefix(KUEUE)
        # Kueue admits an autoscaled cluster only as an elastic job (gate ElasticJobsViaWorkloadSlices).
        metadata["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    if queued and kubernetes.queue.startswith(VOLCANO):
        metadata["labels"] |= {
            "ray.io/scheduler-name": "volcano",
            "volcano.sh/queue-name": kubernetes.queue.removeprefix(VOLCANO),
        }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _metadata(needs: ClusterNeeds, kubernetes: Kubernetes, name: str) -> Manifest:
    return {"name": name, "namespace": kubernetes.namespace, "labels": labels(needs)}


def _port(number: int) -> Manifest:
    return {"protocol": "TCP", "port": number}

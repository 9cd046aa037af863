"""Make manifests for KubeRay 1.6 and later: RayCluster, RayJob, ConfigMap and NetworkPolicy.

Older versions lack token authentication (`authOptions`).
"""

from __future__ import annotations

import base64
import gzip
import shlex

from orchestrator.extensions.render.cluster_needs import ClusterNeeds, NodeGroup
from orchestrator.extensions.render.node_selection import ray_labels
from orchestrator.extensions.render.pods import (
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

KUEUE, VOLCANO = "kueue:", "volcano:"
OUTSIDE = {
    "0.0.0.0/0": ["169.254.169.254/32"],  # AWS, Google Cloud and Azure
    "::/0": ["fd00:ec2::254/128", "fd20:ce::254/128"],  # AWS, Google Cloud
}
"""All addresses, and those of a node's metadata service among them."""
GKE_METADATA = {"ipBlock": {"cidr": "169.254.169.254/32"}}
"""The address at which GKE's metadata server gives pods the credentials of their service account (Workload Identity).

Where a node pool has that server, it hides the node's own credentials. Its second address, 169.254.169.252, is not
excepted above."""
JOB_FILE, SCRIPT = "job.yaml", "run.sh"
RAY_JOB, RAY_CLUSTER = "rayjob.yaml", "raycluster.yaml"
READABLE = 2**17
"""A job file with more characters is compressed. A server allows 1 MiB, and annotations of `kubectl apply` 256 KiB."""
TTL = 600
"""Seconds for which the cluster of an ended job is kept."""


def manifests(
    needs: ClusterNeeds, kubernetes: Kubernetes, job_file: str, runs: str, standing: bool = False
) -> dict[str, Manifest]:
    """Return the manifests by file name. Only one of them starts a cluster.

    Args:
        needs: what the job needs of its cluster.
        kubernetes: the namespace and the objects that the manifests refer to.
        job_file: the text of the job file.
        runs: the URI of the run directory.
        standing: whether the cluster is a RayCluster without a job; else it is that of a RayJob, which trains and then
            deletes it.
    """
    start = {RAY_CLUSTER: ray_cluster} if standing else {RAY_JOB: ray_job}
    return {
        "configmap.yaml": _config_map(needs, kubernetes, job_file, runs),
        "networkpolicy.yaml": network_policy(needs, kubernetes),
        **{name: make(needs, kubernetes) for name, make in start.items()},
    }


def ray_cluster(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """Return a RayCluster alone, for `run --address` and for several jobs."""
    return _object("ray.io/v1", "RayCluster", needs, kubernetes, _cluster_spec(needs, kubernetes))


def script(runs: str, is_packed: bool = False) -> str:
    """Return the script that runs on the head.

    Each retry of the RayJob has a new cluster, and the run continues from its last commit. A refusal of the run is
    retried on the same cluster first.
    """
    file = "/dev/stdin" if is_packed else f"{JOB_FOLDER}/{JOB_FILE}"
    unpacked = f"gzip -dc {JOB_FOLDER}/{JOB_FILE}.gz | " if is_packed else ""
    command = ["orchestrator", "run", file, "--address", "auto", "--run-dir", runs]
    return f"""# Refused: a store that was down for a moment causes a retry, not a failure.
for attempt in 1 2 3; do
  [ $attempt -eq 1 ] || sleep 60
  {unpacked}{shlex.join(command)}
  code=$?
  [ $code -eq 2 ] || break
done
# Stopped at a limit or by its user, with a commit: a retry would only pay for another cluster.
[ $code -eq 3 ] && exit 0
exit $code
"""


def ray_job(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """Return a RayJob: a cluster with the command, deleted some time after its end.

    If it is retried or applied again, the run continues from its last commit.
    """
    spec: Manifest = {
        "entrypoint": f"sh {JOB_FOLDER}/{SCRIPT}",
        "submissionMode": "K8sJobMode",
        "backoffLimit": kubernetes.retries,
        **_deletion(kubernetes.keep_failed),
        "rayClusterSpec": _cluster_spec(needs, kubernetes),
        "submitterPodTemplate": submitter(needs, kubernetes),
    }
    return _object("ray.io/v1", "RayJob", needs, kubernetes, spec)


def _deletion(keep_failed: int | None) -> Manifest:
    if keep_failed is None:
        return {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": TTL}
    ended: tuple[tuple[Manifest, int], ...] = (
        ({"jobStatus": "SUCCEEDED"}, TTL),
        ({"jobStatus": "FAILED"}, keep_failed),
        ({"jobDeploymentStatus": "Failed"}, keep_failed),  # the job did not get as far as to run
    )
    rules = [{"policy": "DeleteCluster", "condition": {**how, "ttlSeconds": ttl}} for how, ttl in ended]
    return {"deletionStrategy": {"deletionRules": rules}}


def network_policy(needs: ClusterNeeds, kubernetes: Kubernetes) -> Manifest:
    """Return the network policy: the run's pods reach each other; from outside only KubeRay and Prometheus do.

    The node's metadata service, which has the node's credentials, is blocked, unless the job polls it for preemption
    notices. On GKE it is open to a run with a service account, which gets its credentials there.
    """
    run_pods = {"podSelector": {"matchLabels": {RUN_LABEL: needs.name}}}
    scrape = [_port(p) for p in (METRICS, AUTOSCALER_METRICS, DASHBOARD_METRICS)]
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    outside = [
        {"ipBlock": {"cidr": every} | ({} if needs.notices else {"except": metadata})}
        for every, metadata in OUTSIDE.items()
    ]
    spec: Manifest = {
        "podSelector": {"matchLabels": {RUN_LABEL: needs.name}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [run_pods]},
            {"from": [operator], "ports": [_port(DASHBOARD)]},
            {"from": [monitoring], "ports": scrape},
        ],
        "egress": [{"to": [run_pods]}, {"to": [{"namespaceSelector": {}}]}, {"to": outside}],
    }
    if kubernetes.platform == "gke" and kubernetes.service_account and not needs.notices:
        spec["egress"].append({"to": [GKE_METADATA], "ports": [_port(80)]})
    return _object("networking.k8s.io/v1", "NetworkPolicy", needs, kubernetes, spec, queued=False)


def kustomization(files: list[str]) -> Manifest:
    """Return the Kustomization for `kubectl apply -k`."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": files,
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
            # The network policy above is the trust boundary: it admits nobody else.
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


def _config_map(needs: ClusterNeeds, kubernetes: Kubernetes, job_file: str, runs: str) -> Manifest:
    metadata = _metadata(needs, kubernetes, f"{needs.name}-job")
    result: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    if len(job_file) <= READABLE:
        return {**result, "data": {JOB_FILE: job_file, SCRIPT: script(runs)}}
    packed = base64.b64encode(gzip.compress(job_file.encode(), mtime=0)).decode()
    return {**result, "data": {SCRIPT: script(runs, True)}, "binaryData": {f"{JOB_FILE}.gz": packed}}


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

"""Manifests for KubeRay, against its real schema and our own rules."""

import dataclasses
from typing import Any

import pytest

from cluster.render import kuberay
from cluster.render.checks import check
from cluster.render.needs import ClusterNeeds
from cluster.render.pods import RUN_LABEL, SPOT, Kubernetes
from cluster.render.schema import violations

EVERYTHING = Kubernetes(
    *("training", "keys", "trainer", "runs", "kueue:team", "redis.ray:6379", "http://s3.store:8333", "gke"),
    "rdma/ib",
)
SETTINGS = {"plain": Kubernetes(), "everything": EVERYTHING, "volcano": Kubernetes(queue="volcano:team")}


def render(needs: ClusterNeeds, kubernetes: Kubernetes = EVERYTHING) -> dict[str, Any]:
    return kuberay.manifests(needs, kubernetes, "name: x\n", "s3://bucket/runs/x")


def cluster(manifests: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifests["rayjob.yaml"]["spec"]["rayClusterSpec"]
    return found


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_kuberay_takes_them(needs: ClusterNeeds, setting: str, schemas: dict[str, Any]) -> None:
    manifests = render(needs, SETTINGS[setting])
    kinds = [m["kind"] for m in manifests.values()]
    assert {"RayJob", "RayCluster"} <= schemas.keys() & set(kinds)
    assert [v for m in manifests.values() for v in violations(m, schemas)] == []


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_our_own_rules_hold(needs: ClusterNeeds, setting: str) -> None:
    assert [line for m in render(needs, SETTINGS[setting]).values() for line in check(m)] == []


def test_the_job_and_the_standing_cluster_are_the_same_cluster(needs: ClusterNeeds) -> None:
    manifests = render(needs)
    assert cluster(manifests) == manifests["raycluster.yaml"]["spec"]
    assert manifests["rayjob.yaml"]["spec"]["entrypoint"] == (
        "orchestrator run /etc/orchestrator/job.yaml --address auto --run-dir s3://bucket/runs/x"
    )


@pytest.mark.parametrize("platform", sorted(SPOT))
def test_spot_workers_and_a_head_that_stays(platform: str) -> None:
    needs = ClusterNeeds("s", "i", 1, 4, cpu=2, gpu=1, spot=True)
    found = cluster(render(needs, dataclasses.replace(EVERYTHING, platform=platform)))
    key, value = SPOT[platform]
    group = found["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    assert group["labels"]["ray.io/market-type"] == "spot"
    assert pod["nodeSelector"] == {key: value}
    assert {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} in pod["tolerations"]
    assert "nvidia.com/gpu" in [t["key"] for t in pod["tolerations"]]
    affinity = found["headGroupSpec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    term = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    assert term == {"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}


def test_worker_pods_hold_their_workers() -> None:
    needs = ClusterNeeds("s", "i", 3, 6, cpu=1.5, gpu=1, memory_gib=2.5, per_node=3, accelerators=("L4",))
    group = cluster(render(needs))["workerGroupSpecs"][0]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "4500m", "memory": "7680Mi", "nvidia.com/gpu": "3", "rdma/ib": "1"}
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 2)
    assert group["labels"] == {"ray.io/market-type": "on-demand", "ray.io/accelerator-type": "L4"}


def test_the_cluster_asks_for_a_token_and_survives_its_head(needs: ClusterNeeds) -> None:
    found = cluster(render(needs))
    assert found["authOptions"] == {"mode": "token", "secretName": "keys"}
    assert found["autoscalerOptions"]["version"] == "v2"
    assert found["gcsFaultToleranceOptions"]["redisAddress"] == "redis.ray:6379"
    password = found["gcsFaultToleranceOptions"]["redisPassword"]
    assert password == {"valueFrom": {"secretKeyRef": {"name": "keys", "key": "redis_password"}}}


def test_queues_are_labels() -> None:
    needs = ClusterNeeds("q", "i", 1, 1)
    kueue = render(needs)["rayjob.yaml"]["metadata"]
    assert kueue["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert kueue["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    volcano = render(needs, SETTINGS["volcano"])["rayjob.yaml"]["metadata"]["labels"]
    assert (volcano["ray.io/scheduler-name"], volcano["volcano.sh/queue-name"]) == ("volcano", "team")
    plain = render(needs, SETTINGS["plain"])["rayjob.yaml"]["metadata"]
    assert plain["labels"].keys() == {RUN_LABEL, "app.kubernetes.io/part-of"}


def test_the_network_policy_selects_every_pod_of_the_run(needs: ClusterNeeds) -> None:
    manifests = render(needs)
    spec = manifests["networkpolicy.yaml"]["spec"]
    chosen = spec["podSelector"]["matchLabels"]
    templates = [
        cluster(manifests)["headGroupSpec"]["template"],
        manifests["rayjob.yaml"]["spec"]["submitterPodTemplate"],
    ]
    templates += [g["template"] for g in cluster(manifests)["workerGroupSpecs"]]
    assert all(chosen.items() <= t["metadata"]["labels"].items() for t in templates)
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    open_to_all = [rule for rule in spec["ingress"] if not rule.get("from")]
    assert open_to_all == []
    reachable = [peer["ipBlock"] for rule in spec["egress"] for peer in rule["to"] if "ipBlock" in peer]
    assert reachable == [{"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}]


def test_the_kustomization_leaves_the_standing_cluster_out(needs: ClusterNeeds) -> None:
    names = kuberay.kustomization(list(render(needs)))["resources"]
    assert names == ["configmap.yaml", "networkpolicy.yaml", "rayjob.yaml"]


@pytest.mark.parametrize("gpu", [0, 2])
def test_workers_with_gpus_have_shared_memory_and_the_network_s_cards(gpu: int) -> None:
    needs = ClusterNeeds("s", "i", 1, 4, cpu=2, gpu=gpu)
    pod = cluster(render(needs))["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    memory = [v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert len(memory) == bool(gpu)
    assert ("/dev/shm" in [m["mountPath"] for m in container["volumeMounts"]]) == bool(gpu)
    assert container["resources"]["limits"].get("rdma/ib") == ("1" if gpu else None)

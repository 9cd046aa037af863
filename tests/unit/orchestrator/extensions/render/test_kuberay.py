"""Manifests for KubeRay, against its real schema and our own rules."""

import base64
import dataclasses
import ipaddress
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.extensions.render import kuberay
from orchestrator.extensions.render.checks import check
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.manifests import violations
from orchestrator.extensions.render.pods import RUN_LABEL, SPOT, Kubernetes

EVERYTHING = Kubernetes(
    *("training", "keys", "trainer", "runs", "kueue:team", "redis.ray:6379", "http://s3.store:8333", "gke"),
    *("rdma/ib", 1, {"NCCL_DEBUG": "INFO"}, {"HF_TOKEN": "hf"}, "image:rank", "image:submitter", 5, 86_400),
    ("registry",),
)
EFA = Kubernetes(rdma="vpc.amazonaws.com/efa", cards=4)
SETTINGS = {
    "plain": Kubernetes(), "everything": EVERYTHING, "volcano": Kubernetes(queue="volcano:team"), "efa": EFA
}  # fmt: skip


def render(needs: ClusterNeeds, kubernetes: Kubernetes = EVERYTHING) -> dict[str, Any]:
    return kuberay.manifests(needs, kubernetes, "name: x\n", "s3://bucket/runs/x")


def cluster(manifests: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifests["rayjob.yaml"]["spec"]["rayClusterSpec"]
    return found


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_kuberay_takes_them(needs: ClusterNeeds, setting: str, schemas: dict[str, Any]) -> None:
    manifests = [*render(needs, SETTINGS[setting]).values(), kuberay.ray_cluster(needs, SETTINGS[setting])]
    kinds = [m["kind"] for m in manifests]
    assert {"RayJob", "RayCluster"} <= schemas.keys() & set(kinds)
    assert [v for m in manifests for v in violations(m, schemas)] == []


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_our_own_rules_hold(needs: ClusterNeeds, setting: str) -> None:
    manifests = [*render(needs, SETTINGS[setting]).values(), kuberay.ray_cluster(needs, SETTINGS[setting])]
    assert [line for m in manifests for line in check(m)] == []


def test_the_job_and_the_standing_cluster_are_the_same_cluster(needs: ClusterNeeds) -> None:
    manifests = render(needs)
    standing = kuberay.manifests(needs, EVERYTHING, "name: x\n", "s3://bucket/runs/x", standing=True)
    assert cluster(manifests) == standing["raycluster.yaml"]["spec"]
    assert manifests["rayjob.yaml"]["spec"]["entrypoint"] == "sh /etc/orchestrator/run.sh"
    command = "orchestrator run /etc/orchestrator/job.yaml --address auto --run-dir s3://bucket/runs/x"
    assert f"\n  {command}\n" in manifests["configmap.yaml"]["data"]["run.sh"]


def test_a_long_job_file_is_packed_and_reaches_the_run_whole(tmp_path: Path) -> None:
    """Of thousands of sources: a server takes 1 MiB, and `kubectl apply` less."""
    job_file = "".join(f"- uri: s3://bucket/part-{number}.jsonl # ä\n" for number in range(40_000))
    made = kuberay.manifests(ClusterNeeds("r", "i", 1, 1), Kubernetes(), job_file, "s3://b/x")[
        "configmap.yaml"
    ]
    assert check(made) == []
    assert made["data"].keys() == {"run.sh"}
    (tmp_path / "job.yaml.gz").write_bytes(base64.b64decode(made["binaryData"]["job.yaml.gz"]))
    (tmp_path / "orchestrator").write_text('#!/bin/sh\ncat "$2"\nexit 5\n')
    (tmp_path / "orchestrator").chmod(0o755)
    script = made["data"]["run.sh"].replace("/etc/orchestrator", str(tmp_path))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, env=env)
    assert (done.returncode, done.stdout.decode()) == (5, job_file)
    short = kuberay.manifests(ClusterNeeds("r", "i", 1, 1), Kubernetes(), "a: b\n", "s3://b/x")[
        "configmap.yaml"
    ]
    assert (short["data"]["job.yaml"], short.get("binaryData")) == ("a: b\n", None)


@pytest.mark.parametrize(
    ("codes", "ends"),
    [("0", 0), ("1", 1), ("3", 0), ("137", 137), ("222", 2), ("20", 0), ("221", 1), ("23", 0)],
)
def test_what_stopped_with_a_commit_is_not_tried_on_a_new_cluster(
    codes: str, ends: int, tmp_path: Path
) -> None:
    """What is refused may be a store that is down: it is tried again a minute later, where it was."""
    waited = tmp_path / "waited"
    for number, code in enumerate([codes] if codes == "137" else codes):
        (tmp_path / f"code-{number}").write_text(code)
    fake = f"""#!/bin/sh
echo "$@"
for each in {tmp_path}/code-*; do code=$(cat "$each"); rm "$each"; exit "$code"; done
"""
    for name, text in (("orchestrator", fake), ("sleep", f'#!/bin/sh\necho "$1" >> {waited}\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = render(ClusterNeeds("r", "i", 1, 1))["configmap.yaml"]["data"]["run.sh"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh"], input=script, text=True, capture_output=True, env={"PATH": path})
    assert done.returncode == ends
    assert done.stdout.split()[-2:] == ["--run-dir", "s3://bucket/runs/x"]
    assert not list(tmp_path.glob("code-*"))
    tries = len(done.stdout.splitlines())
    assert (waited.read_text().split() if waited.exists() else []) == ["60"] * (tries - 1)


def test_a_cluster_goes_after_its_job_that_of_a_failed_one_later_if_it_is_to_be_looked_at() -> None:
    needs = ClusterNeeds("r", "i", 1, 1)
    plain = render(needs, Kubernetes())["rayjob.yaml"]["spec"]
    assert (plain["backoffLimit"], plain["shutdownAfterJobFinishes"], plain["ttlSecondsAfterFinished"]) == (
        3,
        True,
        600,
    )
    assert "deletionStrategy" not in plain
    kept = render(needs, Kubernetes(retries=0, keep_failed=7200))["rayjob.yaml"]["spec"]
    # KubeRay takes rules only without shutdownAfterJobFinishes, and one of the two conditions in each.
    assert "shutdownAfterJobFinishes" not in kept
    rules = kept["deletionStrategy"]["deletionRules"]
    assert {rule["policy"] for rule in rules} == {"DeleteCluster"}
    assert [rule["condition"] for rule in rules] == [
        {"jobStatus": "SUCCEEDED", "ttlSeconds": 600},
        {"jobStatus": "FAILED", "ttlSeconds": 7200},
        {"jobDeploymentStatus": "Failed", "ttlSeconds": 7200},
    ]
    assert kept["backoffLimit"] == 0


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


@pytest.mark.parametrize(
    ("memory_gib", "cpu", "wanted"),
    [(1.3, 1.3, ("3994Mi", "3900m")), (0.5001, 0.0001, ("1537Mi", "1m")), (4, 2, ("12288Mi", "6"))],
)
def test_amounts_of_a_pod_are_no_less_than_its_workers_need(
    memory_gib: float, cpu: float, wanted: tuple[str, str]
) -> None:
    needs = ClusterNeeds("s", "i", 3, 3, cpu=cpu, memory_gib=memory_gib, per_node=3)
    group = cluster(manifests := render(needs))["workerGroupSpecs"][0]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["memory"], limits["cpu"]) == wanted
    assert check(manifests["rayjob.yaml"]) == []


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
    assert reachable == [
        {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]},
        {"cidr": "::/0", "except": ["fd00:ec2::254/128", "fd20:ce::254/128"]},
        {"cidr": "169.254.169.254/32"},  # on GKE, for Workload Identity
    ]


@pytest.mark.parametrize(("standing", "started"), [(False, "rayjob.yaml"), (True, "raycluster.yaml")])
def test_what_is_rendered_starts_one_cluster(needs: ClusterNeeds, standing: bool, started: str) -> None:
    """By `kubectl apply -f` as by `-k`."""
    manifests = kuberay.manifests(needs, EVERYTHING, "a: b\n", "s3://bucket/runs/x", standing)
    assert [name for name, m in manifests.items() if m["kind"] in ("RayJob", "RayCluster")] == [started]
    names = kuberay.kustomization(list(manifests))["resources"]
    assert names == ["configmap.yaml", "networkpolicy.yaml", started]


def lets_out(policy: dict[str, Any], address: str, port: int) -> bool:
    """Whether a network policy lets its pods reach an address outside of the cluster, as Kubernetes reads it."""
    host = ipaddress.ip_address(address)
    for rule in policy["spec"]["egress"]:
        if rule.get("ports") and port not in [p["port"] for p in rule["ports"]]:
            continue
        for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
            excepted = any(host in ipaddress.ip_network(cidr) for cidr in block.get("except", []))
            if host in ipaddress.ip_network(block["cidr"]) and not excepted:
                return True
    return False


METADATA = "169.254.169.254"


@pytest.mark.parametrize(
    ("platform", "account", "reached"),
    [("gke", "trainer", True), ("gke", "", False), ("eks", "trainer", False), ("aks", "trainer", False)],
)
def test_on_gke_a_service_account_reaches_the_server_of_its_credentials(
    platform: str, account: str, reached: bool
) -> None:
    """Both addresses of Google's manual: with Dataplane V2 a policy sees the first, elsewhere the second."""
    kubernetes = Kubernetes(service_account=account, platform=platform)
    policy = render(ClusterNeeds("r", "i", 1, 1), kubernetes)["networkpolicy.yaml"]
    assert lets_out(policy, METADATA, 80) is reached
    assert not lets_out(policy, METADATA, 443)
    assert not lets_out(policy, "fd00:ec2::254", 80)
    assert lets_out(policy, "169.254.169.252", 988)
    assert lets_out(policy, "169.254.170.23", 80)  # EKS Pod Identity
    assert lets_out(policy, "203.0.113.7", 443)
    noticing = render(ClusterNeeds("r", "i", 1, 1, notices=True), kubernetes)["networkpolicy.yaml"]
    assert lets_out(noticing, METADATA, 80)


def test_every_pod_gets_its_image_by_the_pull_secrets(needs: ClusterNeeds) -> None:
    def pods(kubernetes: Kubernetes) -> list[dict[str, Any]]:
        manifests = render(needs, kubernetes)
        found = [cluster(manifests)["headGroupSpec"], *cluster(manifests)["workerGroupSpecs"]]
        templates = [group["template"] for group in found]
        return [t["spec"] for t in (*templates, manifests["rayjob.yaml"]["spec"]["submitterPodTemplate"])]

    names = [{"name": "registry"}, {"name": "mirror"}]
    kubernetes = Kubernetes(pull_secrets=("registry", "mirror"))
    assert [pod.get("imagePullSecrets") for pod in pods(kubernetes)] == [names] * (2 + len(needs.groups()))
    assert [pod for pod in pods(Kubernetes()) if "imagePullSecrets" in pod] == []


def test_pods_request_the_disk_that_they_use() -> None:
    found = cluster(render(ClusterNeeds("r", "i", 1, 1, disk_gib=30.5)))
    pods = [found["headGroupSpec"]["template"], found["workerGroupSpecs"][0]["template"]]
    resources = [pod["spec"]["containers"][0]["resources"] for pod in pods]
    assert [each["requests"]["ephemeral-storage"] for each in resources] == ["10Gi", "31Gi"]
    assert [each["limits"].get("ephemeral-storage") for each in resources] == [None, None]


@pytest.mark.parametrize("gpu", [0, 2])
def test_workers_with_gpus_have_shared_memory_and_the_network_s_cards(gpu: int) -> None:
    needs = ClusterNeeds("s", "i", 1, 4, cpu=2, gpu=gpu)
    pod = cluster(render(needs))["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    memory = [v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert len(memory) == bool(gpu)
    assert ("/dev/shm" in [m["mountPath"] for m in container["volumeMounts"]]) == bool(gpu)
    assert container["resources"]["limits"].get("rdma/ib") == ("1" if gpu else None)


def test_efa_has_its_cards_pages_and_settings_and_the_user_s_own_win() -> None:
    needs = ClusterNeeds("s", "i", 1, 4, cpu=2, gpu=8)
    kubernetes = dataclasses.replace(EFA, env={"NCCL_DEBUG": "INFO", "FI_PROVIDER": "tcp"})
    (container,) = cluster(render(needs, kubernetes))["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert (limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"]) == ("4", "5120Mi")
    values = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    assert values == {"FI_PROVIDER": "tcp", "FI_EFA_FORK_SAFE": "1", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("platform", "kind", "label"),
    [
        ("gke", "H100", ("cloud.google.com/gke-accelerator", "nvidia-h100-80gb")),
        ("karpenter", "L40S", ("karpenter.k8s.aws/instance-gpu-name", "l40s")),
        ("eks", "H100", ("ray.io/accelerator-type", "H100")),
        ("gke", "Odd", ("ray.io/accelerator-type", "Odd")),
    ],
)
def test_nodes_are_selected_by_the_label_that_the_platform_gives_them(
    platform: str, kind: str, label: tuple[str, str]
) -> None:
    needs = ClusterNeeds(
        "s", "i", 1, 4, gpu=1, accelerators=(kind,), labels={"ray.io/accelerator-type": kind}
    )
    group = cluster(render(needs, Kubernetes(platform=platform)))["workerGroupSpecs"][0]
    assert group["template"]["spec"]["nodeSelector"] == dict([label])
    assert group["labels"]["ray.io/accelerator-type"] == kind


def test_each_pod_has_its_image() -> None:
    manifests = render(ClusterNeeds("s", "image:cpu", 1, 4))
    found = cluster(manifests)
    groups = [manifests["rayjob.yaml"]["spec"]["submitterPodTemplate"], found["headGroupSpec"]["template"]]
    groups += [found["workerGroupSpecs"][0]["template"]]
    images = [group["spec"]["containers"][0]["image"] for group in groups]
    assert images == ["image:submitter", "image:cpu", "image:rank"]

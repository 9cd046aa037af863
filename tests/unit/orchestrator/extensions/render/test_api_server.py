"""What a real API server says of a render, with KubeRay's CRDs and the restricted Pod Security Standard.

It needs etcd and kube-apiserver, on PATH or in the folder that KUBEBUILDER_ASSETS names.
"""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import wait_for
from kubernetes_server import ApiServer, served, unable

from orchestrator.cli.app import call
from orchestrator.config.errors import InputError
from orchestrator.extensions.render import kuberay
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.kubernetes import ask_server
from orchestrator.extensions.render.pods import SPOT, Kubernetes, Manifest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unable()), reason=unable())]

ROOT = Path(__file__).parents[5]
NAMESPACE = {"namespace": "training", "service_account": "trainer"}
SETTINGS = {
    "plain": Kubernetes(**NAMESPACE),
    "everything": Kubernetes(
        **NAMESPACE, claim="runs", queue="kueue:team", endpoint="http://s3.store:8333", platform="gke",
        rdma="rdma/ib", env={"NCCL_DEBUG": "INFO", "NCCL_BUFFSIZE": "8388608", "OWN": "1e6"},
        secret_env={"HF_TOKEN": "hf.token"},
        worker_image="image:rank", submitter_image="image:submitter",
        retries=5, keep_failed=86_400, pull_secrets=("registry",),
    ),
    "volcano": Kubernetes(**NAMESPACE, queue="volcano:team", keep_failed=0),
    "efa": Kubernetes(**NAMESPACE, rdma="vpc.amazonaws.com/efa", cards=4, retries=0),
}  # fmt: skip
LABELS = {
    "ray.io/availability-zone": "!eu-1a",
    "ray.io/region": "eu-1",
    "team.example/pool": "in(a,b)",
    "tier": "gold",
}
"""Selectors of each form."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ApiServer]:
    """One that has what docs/guides/spot-cluster.md has applied before a job, all by kubectl itself."""
    crds: Path = pytestconfig.getoption("--kuberay-crds")
    if not list(crds.glob("ray.io_*.yaml")):
        pytest.skip(f"KubeRay's CRD files are not in {crds}; give their folder with --kuberay-crds")
    with served(tmp_path_factory.mktemp("kubernetes")) as found:
        found.must("create", *(f"--filename={path}" for path in sorted(crds.glob("ray.io_*.yaml"))))
        served_now = ("get", "--raw", "/apis/ray.io/v1/namespaces/default/rayjobs")
        wait_for(lambda: found.kubectl(*served_now).returncode == 0, "KubeRay's kinds to be served", 60)
        found.must("create", "namespace", "training")
        # What a controller makes in a cluster.
        found.must("create", "serviceaccount", "default", "--namespace=training")
        for folder in (ROOT / "infra/kuberay", ROOT / "infra/kuberay/quickstart"):
            found.must("apply", "--validate=strict", "--kustomize", folder)
        yield found


def render(needs: ClusterNeeds, kubernetes: Kubernetes) -> dict[str, Manifest]:
    needs = dataclasses.replace(needs, disk_gib=30)
    found = kuberay.manifests(needs, kubernetes, "name: x\n", "s3://bucket/runs/x")
    return found | {"raycluster.yaml": kuberay.ray_cluster(needs, kubernetes)}


def pods(manifests: dict[str, Manifest]) -> Iterator[Manifest]:
    """The pods that KubeRay would make, as they are given to it."""
    job = manifests["rayjob.yaml"]["spec"]
    groups = [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]
    for template in [job["submitterPodTemplate"], *(group["template"] for group in groups)]:
        metadata = {**template["metadata"], "generateName": "p-", "namespace": "training"}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def refused(server: ApiServer, manifest: Manifest) -> str:
    """What the server says against making it; empty if nothing, warnings included."""
    words = ("create", "--filename=-", "--dry-run=server", "--validate=strict", "--output=name")
    return server.kubectl(*words, given=manifest).stderr


def test_a_folder_applied_whole_starts_one_cluster(server: ApiServer, tmp_path: Path) -> None:
    """By `-f`, as many do it, which takes every file, and by `-k`."""
    job = ["cluster", "render", "kuberay", str(ROOT / "examples/quickstart.yaml"), "--set", "name=twice"]
    words = ["--runs", "s3://bucket/runs", "--namespace", "training", "--image", "registry.example/image:1"]
    with pytest.raises(SystemExit) as end:
        call([*job, *words, "--to", str(tmp_path)])
    assert end.value.code == 0
    for option in ("--filename", "--kustomize"):
        # The first ends in an error: no server knows a Kustomization.
        server.kubectl("apply", f"{option}={tmp_path}")
        found = server.must("get", "rayjobs,rayclusters", "--namespace=training", "--output=name").split()
        assert sorted(found) == ["rayjob.ray.io/quickstart", "rayjob.ray.io/twice"]
        server.must("delete", "rayjob/twice", "--namespace=training")


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_variant_is_taken_and_so_are_its_pods(
    server: ApiServer, needs: ClusterNeeds, setting: str
) -> None:
    manifests = render(needs, SETTINGS[setting])
    ask_server(manifests, server.kubeconfig)
    assert [refused(server, pod) for pod in pods(manifests)] == [""] * (2 + len(needs.groups()))


@pytest.mark.parametrize("platform", sorted(SPOT))
@pytest.mark.parametrize("spot", [False, True])
def test_so_is_each_way_to_select_nodes(server: ApiServer, platform: str, spot: bool) -> None:
    needs = ClusterNeeds(
        *("n", "i", 1, 4), gpu=8, spot=spot, accelerators=("H100", "Odd"), labels=LABELS, notices=spot
    )
    manifests = render(needs, Kubernetes(**NAMESPACE, platform=platform))
    ask_server(manifests, server.kubeconfig)
    assert [refused(server, pod) for pod in pods(manifests)] == [""] * 4


def test_the_command_asks_it(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs", "s3://bucket/runs", "--namespace", "training", "--image", "registry.example/image:1"]
    words += ["--kubeconfig", str(server.kubeconfig)]
    with pytest.raises(SystemExit) as end:
        call(["cluster", "render", "kuberay", str(ROOT / "examples/quickstart.yaml"), *words])
    assert end.value.code == 0
    assert "kind: RayJob" in capsys.readouterr().out
    found = server.must("get", "rayjobs,rayclusters", "--namespace=training", "--output=name").split()
    assert found == ["rayjob.ray.io/quickstart"]  # the one of the fixture: nothing was kept


def change(manifest: Manifest, where: str, value: Any) -> Manifest:
    found = copy.deepcopy(manifest)
    *path, last = where.split(".")
    inner: Any = found
    for key in path:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return found


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("spec.retries", 3, "field not declared in schema"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.minReplicas", "one", "minReplicas"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens", "Unsupported value"),
        ("metadata.namespace", "nowhere", "not found"),
        ("metadata.labels", {"a b": "c"}, "a b"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(server: ApiServer, where: str, value: Any, says: str) -> None:
    job = render(ClusterNeeds("r", "i", 1, 1), SETTINGS["plain"])["rayjob.yaml"]
    with pytest.raises(InputError, match=says) as error:
        ask_server({"rayjob.yaml": change(job, where, value)}, server.kubeconfig)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("spec.containers.0.securityContext.allowPrivilegeEscalation", True, "violates PodSecurity"),
        ("spec.hostNetwork", True, "violates PodSecurity"),
        ("spec.containers.0.resources.limits.cpu", "0.1m", "must be less than or equal to cpu limit"),
        ("spec.serviceAccountName", "nobody", 'serviceaccount "nobody" not found'),
    ],
)
def test_a_wrong_pod_would_be_refused(server: ApiServer, where: str, value: Any, says: str) -> None:
    """Else the tests above would say nothing."""
    _, head, *_ = pods(render(ClusterNeeds("r", "i", 1, 1), SETTINGS["plain"]))
    assert says in refused(server, change(head, where, value))


def test_mlflow_s_manifests_are_taken(server: ApiServer) -> None:
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict")
    for path in sorted((ROOT / "infra/mlflow/kubernetes").glob("*.yaml")):
        if path.name != "kustomization.yaml":
            server.must(*words, "--namespace=training", f"--filename={path}")

"""What a manifest promises is what its job asks, over job files, platforms and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.workers.gang import Bundle
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.extensions.render import kuberay
from orchestrator.extensions.render.checks import check
from orchestrator.extensions.render.manifests import load_schemas, violations
from orchestrator.extensions.render.memory import with_host_memory
from orchestrator.extensions.render.needs import CLOUDS, needed_machines
from orchestrator.extensions.render.pods import RUNS_FOLDER, SPOT, Kubernetes

Manifest = dict[str, Any]
LABELS = st.fixed_dictionaries(
    {},
    optional={
        "team": st.sampled_from(["blue", "!red", "!in(red,green)"]),
        "ray.io/availability-zone": st.sampled_from(["z1", "!z2"]),
        "ray.io/region": st.just("r1"),
        "ray.io/market-type": st.sampled_from(["spot", "on-demand", "!spot"]),
        "ray.io/accelerator-type": st.sampled_from(["H100", "in(H100,A100)"]),
    },
)
TO_NODE = {
    "ray.io/availability-zone": "topology.kubernetes.io/zone",
    "ray.io/region": "topology.kubernetes.io/region",
}
VALUES = {
    "team": ["blue", "red", "green"],
    "topology.kubernetes.io/zone": ["z1", "z2", "z3"],
    "topology.kubernetes.io/region": ["r1", "r2"],
    "ray.io/accelerator-type": ["H100", "A100", "L4"],
}


def job(**fields: Any) -> JobSpec:
    return parse({
        "name": "a-run",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "s3://b/*.txt"}], "tokenizer": {"train_bpe": 300}, "sequence_length": 16},
        "train": {"steps": 1, "global_batch": 64},
        **fields,
    })  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    least, more, gpu = draw(st.integers(1, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 1))
    labels = draw(LABELS)
    if not gpu:
        labels.pop("ray.io/accelerator-type", None)
    return job(
        parallel=draw(st.sampled_from(["auto", {"tp": 1}, {"tp": 2}, {"tp": 8}])),
        resources={
            "workers": {"min": least, "max": least + more},
            "per_worker": {"cpu": draw(st.sampled_from([0.5, 1, 4])), "gpu": gpu, "labels": labels},
            "notices": draw(st.sampled_from([None, "aws", "gcp", "azure", "/etc/notice"])),
        },
    )


NODES = st.fixed_dictionaries(
    {}, optional={label: st.sampled_from(values) for label, values in VALUES.items()}
)


def may_stand(pod: Manifest, node: dict[str, str]) -> bool:
    """Kubernetes' scheduler, as far as labels go."""
    if not pod.get("nodeSelector", {}).items() <= node.items():
        return False
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    return all(
        (node.get(e["key"]) in e["values"]) == (e["operator"] == "In")
        for t in terms
        for e in t["matchExpressions"]
    )


@settings(max_examples=60, deadline=None)
@given(
    spec=jobs(),
    platform=st.sampled_from(sorted(SPOT)),
    spot=st.booleans(),
    accelerators=st.sampled_from([(), ("H100",), ("H100", "A100")]),
    claim=st.sampled_from(["", "runs"]),
    nodes=st.lists(NODES, min_size=6, max_size=6),
)
def test_a_manifest_promises_what_its_job_asks(
    spec: JobSpec,
    platform: str,
    spot: bool,
    accelerators: tuple[str, ...],
    claim: str,
    nodes: list[dict[str, str]],
    pytestconfig: pytest.Config,
) -> None:
    worker = spec.resources.per_worker
    given = (None, spot, None, accelerators if worker.gpu else ())
    market = worker.labels.get("ray.io/market-type", "!")
    if Bundle(labels={"market": market}).suits({"market": "spot" if spot else "on-demand"}) or market == "!":
        needs, _ = with_host_memory(
            spec,
            needed_machines(spec.name, spec.resources, spec.parallel, spec.all_workers, *given),
            None,
        )
    else:
        with pytest.raises(InputError, match="labels"):
            needed_machines(spec.name, spec.resources, spec.parallel, spec.all_workers, *given)
        return
    kubernetes = Kubernetes(claim=claim, platform=platform)
    base = RUNS_FOLDER if claim else "s3://b/runs"
    files = kuberay.manifests(needs, kubernetes, dump(spec), f"{base}/{spec.name}")
    assert [line for m in files.values() for line in check(m) + violations(m, schemas(pytestconfig))] == []
    assert parse(yaml.safe_load(files["configmap.yaml"]["data"]["job.yaml"])) == spec
    cluster = files["rayjob.yaml"]["spec"]["rayClusterSpec"]
    workers_hold_what_is_asked(spec, cluster)
    for group in cluster["workerGroupSpecs"]:
        labels_are_true(spec, group, SPOT[platform], nodes)
    outside = [
        peer["ipBlock"]
        for rule in files["networkpolicy.yaml"]["spec"]["egress"]
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    assert [block["cidr"] for block in outside] == ["0.0.0.0/0", "::/0"]
    hidden = spec.resources.notices not in CLOUDS.values()  # no service account: GKE's server is not needed
    assert all(("except" in block) is hidden for block in outside)


def schemas(config: pytest.Config) -> dict[str, Any]:
    """KubeRay's, read once; none where its files are not."""
    folder: Path = config.getoption("--kuberay-crds")
    if folder not in LOADED:
        LOADED[folder] = load_schemas(folder) if list(folder.glob("ray.io_*.yaml")) else {}
    return LOADED[folder]


LOADED: dict[Path, dict[str, Any]] = {}


def workers_hold_what_is_asked(spec: JobSpec, cluster: Manifest) -> None:
    """Processors, GPUs, nodes enough, a tensor group on one node, the right image, mounts and no plain secret."""
    worker, workers = spec.resources.per_worker, spec.resources.workers
    tp = 1 if spec.parallel == "auto" else spec.parallel.tp
    groups = cluster["workerGroupSpecs"]
    assert sum(group["minReplicas"] for group in groups) * tp >= workers.min
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert group["maxReplicas"] * tp >= workers.max
        assert limits["cpu"] in (f"{worker.cpu * tp:g}", f"{worker.cpu * tp * 1000:g}m")
        assert limits.get("nvidia.com/gpu", "0") == str(int(worker.gpu) * tp)
        assert container["image"] == f"training-orchestrator:{'cuda' if worker.gpu else 'cpu'}"
        assert all("valueFrom" in variable for variable in container["env"])
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def labels_are_true(
    spec: JobSpec, group: Manifest, spot: tuple[str, str], nodes: list[dict[str, str]]
) -> None:
    """Wherever a pod may stand, its Ray node has the labels that it says it has, and the job's workers fit there."""
    pod, said = group["template"]["spec"], group["labels"]
    wanted = dict(spec.resources.per_worker.labels)
    for node, taken in ((node, taken) for node in nodes for taken in (True, False)):
        known = node | ({spot[0]: spot[1]} if taken else {})
        if not may_stand(pod, known):
            continue
        assert (said["ray.io/market-type"] == "spot") is taken
        for label, value in said.items():
            if label != "ray.io/market-type":
                assert known[TO_NODE.get(label, label)] == value
        here = {ray: known[name] for ray, name in TO_NODE.items() if name in known} | said
        here |= {name: known[name] for name in ("team", "ray.io/accelerator-type") if name in known}
        if "ray.io/accelerator-type" not in said or Bundle(labels=wanted).suits(here):
            assert Bundle(labels=wanted).suits(here)


@pytest.mark.parametrize(
    ("fields", "options", "says"),
    [
        (
            {"parallel": {"tp": 8}},
            {"per_node": 1},
            "those 8 workers must share a node; give 8 or leave it out",
        ),
        ({"parallel": {"tp": 4}}, {"per_node": 6}, "--per-node"),
        (
            {"resources": {"per_worker": {"gpu": 1}}},
            {"image": "registry/training-orchestrator:cpu"},
            "has no CUDA",
        ),
        (
            {"resources": {"per_worker": {"labels": {"rack": "in(a,b)"}}}},
            {},
            "rack: no rendered node would have this label",
        ),
    ],
)
def test_what_machines_could_never_give_is_refused(
    fields: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    given = {"image": None, "spot": False, "per_node": None, "accelerators": (), **options}
    with pytest.raises(InputError) as refused:
        needed_machines(
            (asked := job(**fields)).name, asked.resources, asked.parallel, asked.all_workers, **given
        )
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_multiple_of_tensor_groups_may_share_a_node() -> None:
    spec = job(parallel={"tp": 2}, resources={"workers": 8})
    assert (
        needed_machines(
            name=spec.name,
            resources=spec.resources,
            parallel=spec.parallel,
            every=spec.all_workers,
            image=None,
            spot=False,
            per_node=4,
            accelerators=(),
        ).per_node
        == 4
    )
    assert (
        needed_machines(
            name=spec.name,
            resources=spec.resources,
            parallel=spec.parallel,
            every=spec.all_workers,
            image=None,
            spot=False,
            per_node=None,
            accelerators=(),
        ).per_node
        == 2
    )

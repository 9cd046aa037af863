"""The launcher's YAML, through Ray's own preparation and schema."""

from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.workers.machine import MACHINE_TYPE
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.launcher import DEFAULT_REGIONS, GCP_GPU_IMAGE, HEAD, TOKEN, cloud, local

PREEMPTIBLE = {
    "aws": lambda node: node.get("InstanceMarketOptions") == {"MarketType": "spot"},
    "gcp": lambda node: node.get("scheduling", [{}])[0].get("preemptible", False),
    "azure": lambda node: node["azure_arm_parameters"].get("priority") == "Spot",
}


@pytest.mark.parametrize("kind", sorted(DEFAULT_REGIONS))
def test_ray_takes_it(kind: str, needs: ClusterNeeds) -> None:
    prepared = prepare_config(cloud(kind, needs, DEFAULT_REGIONS[kind]))
    validate_config(prepared)
    assert prepared["provider"]["type"] == kind
    assert prepared["max_workers"] == max(g.max for g in needs.groups())
    # Nothing of the defaults that Ray would add: its nightly wheel, above all.
    assert "ray-wheels" not in str(prepared)


@pytest.mark.parametrize("kind", sorted(DEFAULT_REGIONS))
@pytest.mark.parametrize("spot", [True, False])
def test_workers_may_be_spot_and_the_head_never(kind: str, spot: bool) -> None:
    needs = ClusterNeeds("c", "i", 2, 8, cpu=4, gpu=1, per_node=2, accelerators=("L4",), spot=spot)
    types = dict(cloud(kind, needs, DEFAULT_REGIONS[kind])["available_node_types"])
    head = types.pop(HEAD)
    assert not PREEMPTIBLE[kind](head["node_config"])
    assert head["resources"] == {"CPU": 0}
    (worker,) = types.values()
    assert PREEMPTIBLE[kind](worker["node_config"]) is spot
    assert (worker["min_workers"], worker["max_workers"]) == (1, 4)
    assert worker["resources"] == {"CPU": 8, "GPU": 2, "memory": 8 * 2**30}
    assert worker["labels"]["ray.io/market-type"] == ("spot" if spot else "on-demand")


@pytest.mark.parametrize("kind", [*sorted(DEFAULT_REGIONS), "local"])
@pytest.mark.parametrize("gpu", [0, 1])
def test_docker_is_asked_for_gpus_on_workers_alone(kind: str, gpu: int) -> None:
    """As Ray puts the options of a node's container together."""
    needs = ClusterNeeds("c", "i", 1, 2, gpu=gpu)
    prepared = prepare_config(
        local(needs, "a", ("b",), "u") if kind == "local" else cloud(kind, needs, DEFAULT_REGIONS[kind])
    )
    validate_config(prepared)
    docker = prepared["docker"]
    options = {
        role: docker["run_options"] + docker.get(f"{role}_run_options", []) for role in ("head", "worker")
    }
    assert "--gpus all" not in options["head"]
    assert ("--gpus all" in options["worker"]) is bool(gpu)


def test_google_s_machines_with_gpus_have_a_driver_and_are_not_moved() -> None:
    needs = ClusterNeeds("c", "i", 1, 2, gpu=1)
    types = cloud("gcp", needs, DEFAULT_REGIONS["gcp"])["available_node_types"]
    images = {
        name: each["node_config"]["disks"][0]["initializeParams"]["sourceImage"].rpartition("/")[2]
        for name, each in types.items()
    }
    assert images == {HEAD: "common-cpu", "gpu": GCP_GPU_IMAGE}
    assert types["gpu"]["node_config"]["scheduling"] == [{"onHostMaintenance": "TERMINATE"}]
    assert "scheduling" not in types[HEAD]["node_config"]


def test_memory_that_is_not_given_is_what_ray_finds_on_the_machine() -> None:
    document = cloud("aws", ClusterNeeds("c", "i", 1, 1, memory_gib=0.0), DEFAULT_REGIONS["aws"])
    assert document["available_node_types"]["cpu"]["resources"] == {"CPU": 1}


def test_labels_that_the_job_asks_for_are_on_the_nodes() -> None:
    wanted = {"team": "blue", "rack": "!in(r1,r2)", "ray.io/availability-zone": "us-west-2a"}
    document = cloud("aws", ClusterNeeds("c", "i", 1, 1, labels=wanted), DEFAULT_REGIONS["aws"])
    labels = document["available_node_types"]["cpu"]["labels"]
    assert labels == {"ray.io/market-type": "on-demand", "team": "blue", MACHINE_TYPE: "m6i.2xlarge"}


def started(document: dict[str, Any]) -> list[str]:
    return [c for k in ("head", "worker") for c in document[f"{k}_start_ray_commands"] if "ray start" in c]


def test_machines_that_are_there(needs: ClusterNeeds) -> None:
    document = local(needs, "10.0.0.1", ("10.0.0.2", "10.0.0.3"), "ops")
    prepared = prepare_config(document)
    validate_config(prepared)
    assert prepared["max_workers"] == 2
    assert document["auth"] == {"ssh_user": "ops"}


@pytest.mark.parametrize("kind", [*sorted(DEFAULT_REGIONS), "local"])
def test_nothing_listens_without_a_token(kind: str) -> None:
    needs = ClusterNeeds("c", "i", 1, 1)
    document = (
        local(needs, "a", ("b",), "u") if kind == "local" else cloud(kind, needs, DEFAULT_REGIONS[kind])
    )
    assert len(started(document)) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in started(document))
    assert document["file_mounts"] == {TOKEN: TOKEN}
    assert "--dashboard-host=127.0.0.1" in started(document)[0]


def test_rays_schema_would_refuse_a_wrong_one() -> None:
    document = cloud("aws", ClusterNeeds("c", "i", 1, 1), DEFAULT_REGIONS["aws"])
    document["available_node_types"]["cpu"]["min_worker"] = 1
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepare_config(document))

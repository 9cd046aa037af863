"""infra/terraform/aws by the real Terraform: `validate`, and the policy that its plan must keep.

AWS's provider is stood for by `terraform_provider`, which has its schema and reaches no cloud.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from terraform_provider import provider

MODULE = Path(__file__).parents[2] / "infra/terraform/aws"
pytestmark = pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not on PATH")
Terraform = Callable[..., subprocess.CompletedProcess[str]]
ADMIN = "arn:aws:iam::123456789012:role/admin"


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terraform]:
    """Runs a command of Terraform on a copy of the module, which has no state."""
    folder = tmp_path_factory.mktemp("terraform") / "aws"
    shutil.copytree(MODULE, folder, ignore=shutil.ignore_patterns(".terraform*"))
    with provider() as variables:
        env = {**os.environ, **variables, "TF_CLI_CONFIG_FILE": os.devnull, "TF_IN_AUTOMATION": "1"}

        def run(*words: str, place: Path = folder) -> subprocess.CompletedProcess[str]:
            command = ["terraform", f"-chdir={place}", *words]
            return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

        done = run("init", "-backend=false")
        assert done.returncode == 0, done.stderr
        yield run


@pytest.fixture(scope="module")
def document(terraform: Terraform) -> dict[str, Any]:
    """The plan of a first apply, with a network and a role that may enter."""
    words = [
        "-var",
        'admin_cidrs=["203.0.113.0/24"]',
        "-var",
        f'admins=["{ADMIN}"]',
        "-var",
        "on_demand_max=2",
    ]
    done = terraform("plan", "-no-color", "-input=false", "-out=plan", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(terraform("show", "-json", "plan").stdout)
    assert result["errored"] is False
    return result


@pytest.fixture(scope="module")
def plan(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the apply would make, by address."""
    changes = document["resource_changes"]
    return {each["address"]: each["change"]["after"] for each in changes if each["mode"] == "managed"}


def test_terraform_takes_the_module(terraform: Terraform) -> None:
    found = json.loads(terraform("validate", "-json").stdout)
    assert found["diagnostics"] == []
    assert found["valid"] is True


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("bootstrap_cluster_creator_admin_permissions", "bootstrap_creator", "Unsupported argument"),
        ("  principal_arn = each.key\n", "", "Missing required argument"),
        ("aws_iam_role.disks.arn]", "aws_iam_role.disk.arn]", "Reference to undeclared resource"),
    ],
)
def test_it_would_refuse_a_wrong_one(
    terraform: Terraform, tmp_path: Path, before: str, after: str, says: str
) -> None:
    shutil.copytree(MODULE, tmp_path / "aws", ignore=shutil.ignore_patterns(".terraform*"))
    file = tmp_path / "aws/cluster.tf"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    assert terraform("init", "-backend=false", place=tmp_path / "aws").returncode == 0
    found = json.loads(terraform("validate", "-json", place=tmp_path / "aws").stdout)
    assert (found["valid"], says in [each["summary"] for each in found["diagnostics"]]) == (False, True)


def test_the_maker_and_named_roles_can_enter(plan: dict[str, dict[str, Any]]) -> None:
    cluster = plan["aws_eks_cluster.this"]
    assert cluster["access_config"] == [
        {"authentication_mode": "API", "bootstrap_cluster_creator_admin_permissions": True}
    ]
    (vpc,) = cluster["vpc_config"]
    assert (vpc["endpoint_public_access"], vpc["public_access_cidrs"]) == (True, ["203.0.113.0/24"])
    assert plan[f'aws_eks_access_entry.admin["{ADMIN}"]']["principal_arn"] == ADMIN
    policy = plan[f'aws_eks_access_policy_association.admin["{ADMIN}"]']
    assert policy["policy_arn"].endswith("/AmazonEKSClusterAdminPolicy")
    assert policy["access_scope"][0]["type"] == "cluster"


def test_volume_claims_get_disks(plan: dict[str, dict[str, Any]]) -> None:
    driver = plan['aws_eks_addon.this["aws-ebs-csi-driver"]']
    assert json.loads(driver["configuration_values"]) == {"defaultStorageClass": {"enabled": True}}
    assert [each["service_account"] for each in driver["pod_identity_association"]] == [
        "ebs-csi-controller-sa"
    ]
    others = [each for name, each in plan.items() if name.startswith("aws_eks_addon.") and each is not driver]
    assert [each["pod_identity_association"] for each in others] == [[]] * 4
    policy = plan["aws_iam_role_policy_attachment.disks"]["policy_arn"]
    assert policy.endswith("/service-role/AmazonEBSCSIDriverPolicy")


def test_heads_stay_and_spot_workers_are_kept_apart(plan: dict[str, dict[str, Any]]) -> None:
    groups = {name: each for name, each in plan.items() if name.startswith("aws_eks_node_group.")}
    kinds = {
        name: (each["capacity_type"], [t["effect"] for t in each["taint"]]) for name, each in groups.items()
    }
    assert kinds == {
        "aws_eks_node_group.head": ("ON_DEMAND", []),
        "aws_eks_node_group.on_demand[0]": ("ON_DEMAND", []),
        **{f'aws_eks_node_group.spot["us-west-2{zone}"]': ("SPOT", ["NO_SCHEDULE"]) for zone in "abc"},
    }
    assert groups["aws_eks_node_group.head"]["instance_types"] == ["r6i.xlarge"]
    assert [group["scaling_config"][0]["min_size"] for group in groups.values()].count(0) == 4


def test_heads_have_one_zone_as_the_disk_of_redis_has(document: dict[str, Any]) -> None:
    resources = document["configuration"]["root_module"]["resources"]
    (head,) = (each for each in resources if each["address"] == "aws_eks_node_group.head")
    assert "local.zones[0]" in head["expressions"]["subnet_ids"]["references"]


def test_the_autoscaler_may_change_the_groups_of_its_cluster_alone(
    document: dict[str, Any], plan: dict[str, dict[str, Any]]
) -> None:
    bound = plan["aws_eks_pod_identity_association.autoscaler"]
    assert (bound["namespace"], bound["service_account"]) == ("kube-system", "cluster-autoscaler")
    command = document["planned_values"]["outputs"]["autoscaler"]["value"]
    assert f"rbac.serviceAccount.name={bound['service_account']} " in command
    assert f"--namespace {bound['namespace']} " in command
    assert command.endswith("awsRegion=us-west-2 --set autoDiscovery.clusterName=training")
    resources = document["configuration"]["root_module"]["resources"]
    (policy,) = (each for each in resources if each["address"] == "data.aws_iam_policy_document.autoscaler")
    reads, changes = policy["expressions"]["statement"]
    assert all(":Describe" in name or ":Get" in name for name in reads["actions"]["constant_value"])
    (condition,) = changes["condition"]
    assert "var.name" in condition["variable"]["references"]


def test_no_metadata_without_a_token_and_no_public_bucket(plan: dict[str, dict[str, Any]]) -> None:
    templates = [each for name, each in plan.items() if name.startswith("aws_launch_template.")]
    hops = [each["metadata_options"][0] for each in templates]
    assert [(each["http_tokens"], each["http_put_response_hop_limit"]) for each in hops] == [
        ("required", 1)
    ] * 2
    closed = plan["aws_s3_bucket_public_access_block.runs"]
    names = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert [closed[name] for name in names] == [True] * 4


def test_the_api_is_private_unless_a_network_is_named(terraform: Terraform) -> None:
    done = terraform("plan", "-no-color", "-input=false", "-var", 'admin_cidrs=["0.0.0.0/0"]')
    assert done.returncode == 1
    assert "The API is not opened to the whole internet." in done.stdout + done.stderr

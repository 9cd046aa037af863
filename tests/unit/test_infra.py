"""infra/: every file holds together, with the real schemas, grammars and metric names that can be had here."""

import itertools
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2
import kubernetes_validate
import pytest
import yaml

from orchestrator.cli.app import call
from orchestrator.config.redact import redact
from orchestrator.config.spec import parse
from orchestrator.extensions.render.checks import check
from orchestrator.extensions.render.manifests import load_schemas, violations

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = "1.33"
FILES = sorted(
    path for path in INFRA.rglob("*") if path.is_file() and not {"secrets", ".terraform"} & set(path.parts)
)
TERRAFORM = sorted((INFRA / "terraform/aws").glob("*.tf"))


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted([*(INFRA / "kuberay").rglob("*.yaml"), *(INFRA / "mlflow/kubernetes").glob("*.yaml")]):
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.relative_to(INFRA)}:{document['kind']}", document


MANIFESTS = dict(manifests())
PLAIN = {k: m for k, m in MANIFESTS.items() if not re.search("ray.io|kustomize", m["apiVersion"])}
PODS = {
    k: m["spec"]["template"]["spec"] for k, m in PLAIN.items() if m["kind"] in ("Deployment", "StatefulSet")
}


@pytest.mark.parametrize("name", PLAIN)
def test_kubernetes_takes_its_own_kinds(name: str) -> None:
    kubernetes_validate.validate(PLAIN[name], KUBERNETES, strict=True)


def test_kubernetes_would_refuse_a_wrong_one() -> None:
    wrong = json.loads(json.dumps(next(m for m in PLAIN.values() if m["kind"] == "StatefulSet")))
    wrong["spec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods_meet_the_restricted_standard(name: str) -> None:
    pod = PODS[name]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        assert container.keys() >= {"readinessProbe", "livenessProbe"}


@pytest.mark.parametrize("name", PODS)
def test_every_server_has_a_network_policy(name: str) -> None:
    labels = MANIFESTS[name]["spec"]["template"]["metadata"]["labels"]
    policies = [m["spec"] for m in PLAIN.values() if m["kind"] == "NetworkPolicy"]
    own = [p for p in policies if p["podSelector"].get("matchLabels", {}).items() <= labels.items()]
    assert own
    assert all(rule.get("from") for policy in own for rule in policy.get("ingress", []))


def test_the_example_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [
        "--runs",
        "pvc:runs",
        "--namespace",
        "training",
        "--service-account",
        "trainer",
        "--spot",
        "--image",
        "training-orchestrator:cpu",
        "--to",
    ]
    with pytest.raises(SystemExit) as end:
        call(["cluster", "render", "kuberay", "examples/quickstart.yaml", *words, str(tmp_path)])
    assert end.value.code == 0
    written = {p.name: yaml.safe_load(p.read_text()) for p in tmp_path.iterdir()}
    kept = {p.name: yaml.safe_load(p.read_text()) for p in (INFRA / "kuberay/quickstart").iterdir()}
    # The job stands there with its defaults: new ones may have come since, and mean the same job.
    jobs = [parse(yaml.safe_load(m["configmap.yaml"]["data"].pop("job.yaml"))) for m in (written, kept)]
    assert jobs[0] == jobs[1]
    assert written == kept


def test_kuberay_takes_the_example(pytestconfig: pytest.Config) -> None:
    folder: Path = pytestconfig.getoption("--kuberay-crds")
    if not list(folder.glob("ray.io_*.yaml")):
        pytest.skip(f"KubeRay's CRD files are not in {folder}; give their folder with --kuberay-crds")
    schemas = load_schemas(folder)
    found = [m for m in MANIFESTS.values() if m["apiVersion"] == "ray.io/v1"]
    assert [m["kind"] for m in found] == ["RayJob"]
    assert [line for m in found for line in check(m) + violations(m, schemas)] == []


@pytest.mark.parametrize("path", sorted(INFRA.rglob("kustomization.yaml")), ids=lambda p: str(p.parent.name))
def test_kustomizations_name_what_is_there(path: Path) -> None:
    for name in yaml.safe_load(path.read_text())["resources"]:
        found = path.parent / name
        assert found.is_file() or (found / "kustomization.yaml").is_file()


def test_no_job_is_started_by_what_a_namespace_needs_once() -> None:
    path = INFRA / "kuberay"
    names = yaml.safe_load((path / "kustomization.yaml").read_text())["resources"]
    kinds = {m["kind"] for name in names for m in yaml.safe_load_all((path / name).read_text())}
    assert "StatefulSet" in kinds
    assert not {"RayJob", "RayCluster"} & kinds


def test_secrets_are_referred_to_and_made_by_the_documented_commands() -> None:
    made = set(re.findall(r"keep (\w+)|for name in ([\w ]+);", (INFRA / "mlflow/credentials.sh").read_text()))
    names = {word for pair in made for part in pair for word in part.split()} | {"s3_identities"}
    used = {
        item["key"]
        for pod in PODS.values()
        for volume in pod.get("volumes", [])
        for item in volume.get("secret", {}).get("items", [])
    }
    assert used == names - {""}
    compose = yaml.safe_load((INFRA / "mlflow/compose.yaml").read_text())
    assert compose["secrets"].keys() == used
    assert {s for service in compose["services"].values() for s in service.get("secrets", [])} == used


def test_compose_is_reachable_from_this_machine_only() -> None:
    compose = yaml.safe_load((INFRA / "mlflow/compose.yaml").read_text())
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name, service in compose["services"].items():
        assert "healthcheck" in service, name
        assert set(service["networks"]) <= compose["networks"].keys()
        assert set(service.get("depends_on", {})) <= compose["services"].keys()


def test_no_file_carries_a_secret() -> None:
    for path in FILES:
        text = path.read_text()
        assert not re.search(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN|xox[bp]-|ghp_\w{20}", text), path
    for name, manifest in MANIFESTS.items():
        assert manifest["kind"] != "Secret", name
        for container in itertools.chain.from_iterable(find(manifest, "containers")):
            values = {v["name"]: v["value"] for v in container.get("env", []) if "value" in v}
            plain = {k: v for k, v in values.items() if not v.startswith("/")}  # a path is a reference
            assert redact(plain) == plain, name


def test_scripts_are_posix_shell() -> None:
    for path in INFRA.rglob("*.sh"):
        subprocess.run(["sh", "-n", str(path)], check=True)
        assert path.read_text().startswith("#!/bin/sh\n")
        assert "set -eu" in path.read_text()


def test_credentials_are_random_private_and_kept(tmp_path: Path) -> None:
    script = tmp_path / "credentials.sh"
    script.write_text((INFRA / "mlflow/credentials.sh").read_text())
    subprocess.run(["sh", str(script)], check=True)
    first = {p.name: p.read_text() for p in (tmp_path / "secrets").iterdir()}
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    assert len(set(first.values())) == len(first)
    assert all(len(value) >= 48 for value in first.values())
    (identity,) = json.loads(first["s3_identities"])["identities"]
    assert identity["credentials"] == [
        {"accessKey": first["aws_access_key_id"], "secretKey": first["aws_secret_access_key"]}
    ]
    subprocess.run(["sh", str(script)], check=True)
    assert {p.name: p.read_text() for p in (tmp_path / "secrets").iterdir()} == first


@pytest.mark.parametrize(
    "path", [INFRA / "Dockerfile", INFRA / "mlflow/Dockerfile"], ids=lambda p: p.parent.name
)
def test_images_are_pinned_and_run_as_nobody_special(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)(?: AS ([\w-]+))?", text, re.MULTILINE)
    stages = {stage for _, stage in bases if stage}
    version = re.search(r"^ARG PYTHON=(\S+)", text, re.MULTILINE)
    outside = [
        base.replace("${PYTHON}", version[1] if version else "") for base, _ in bases if base not in stages
    ]
    assert outside
    assert all(re.search(r":\d+\.\d+", base) for base in outside)
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users == ["1000:1000"]


def test_the_image_has_all_that_is_installed() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    allowed = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / name).exists() for name in names)
    assert {f"!{name}" for name in names} == {line for line in allowed if line.startswith("!")}
    installs = re.findall(r"pip install.*", (INFRA / "Dockerfile").read_text())
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in line for line in installs)
    assert sum('".${EXTRAS:+[${EXTRAS}]}"' in line for line in installs) == 2


def test_every_extra_that_an_image_may_have_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for extra, asked in project["project"]["optional-dependencies"].items():
        if extra == "vllm":  # it needs another compressed-tensors than the extra quantize
            continue
        names = {re.split("[<>=]", each)[0] for each in asked}
        assert names <= pinned, extra


def terraform() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in TERRAFORM:
        with path.open() as file:
            for kind, blocks in hcl2.load(file).items():
                found.setdefault(kind, []).extend(blocks)
    return found


def test_terraform_refers_to_what_it_declares() -> None:
    text = "".join(path.read_text() for path in TERRAFORM)
    blocks = terraform()
    variables = {name.strip('"') for block in blocks["variable"] for name in block}
    assert set(re.findall(r"\bvar\.(\w+)", text)) == variables
    assert set(re.findall(r"\blocal\.(\w+)", text)) <= {k for block in blocks["locals"] for k in block}
    for kind, prefix in (("resource", r"(?<![\w.])"), ("data", r"\bdata\.")):
        pairs = [(type_, name) for block in blocks[kind] for type_, named in block.items() for name in named]
        declared = {f"{type_}.{name}".replace('"', "") for type_, name in pairs}
        used = set(re.findall(prefix + r"(aws_\w+\.\w+)", text))
        assert used <= declared, kind
        assert declared


def resources_of_terraform() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for block in terraform()["resource"]:
        for type_, named in block.items():
            found.setdefault(type_.strip('"'), {}).update({k.strip('"'): v for k, v in named.items()})
    return found


def test_whoever_makes_the_cluster_can_enter_it_and_so_can_named_roles() -> None:
    """In this mode AWS lets in nobody who has no access entry, and the provider makes none of itself."""
    resources = resources_of_terraform()
    (access,) = resources["aws_eks_cluster"]["this"]["access_config"]
    assert access["authentication_mode"].strip('"') == "API"
    assert access["bootstrap_cluster_creator_admin_permissions"] is True
    assert resources["aws_eks_access_entry"]["admin"]["for_each"] == "${toset(var.admins)}"
    policy = resources["aws_eks_access_policy_association"]["admin"]["policy_arn"]
    assert policy.strip('"').endswith(":cluster-access-policy/AmazonEKSClusterAdminPolicy")


def test_a_volume_claim_without_a_class_gets_a_disk() -> None:
    """As Redis's: EKS has neither a driver for disks nor a default storage class."""
    classes = [c["spec"].get("storageClassName") for s in PLAIN.values() for c in claims(s)]
    assert classes == [None] * len(classes)
    assert classes
    (addons,) = [block["addons"] for block in terraform()["locals"] if "addons" in block]
    assert addons["aws-ebs-csi-driver"] == {"defaultStorageClass": {"enabled": True}}
    resources = resources_of_terraform()
    (dynamic,) = resources["aws_eks_addon"]["this"]["dynamic"]
    (association,) = {k.strip(chr(34)): v for k, v in dynamic.items()}["pod_identity_association"]["content"]
    assert association["service_account"].strip('"') == "ebs-csi-controller-sa"
    attached = resources["aws_iam_role_policy_attachment"]["disks"]
    assert attached["policy_arn"].strip('"').endswith("policy/service-role/AmazonEBSCSIDriverPolicy")


def claims(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        manifest["spec"].get("volumeClaimTemplates", []) if "spec" in manifest else []
    )
    return found


MACHINES = {"m6i.xlarge": (4, 16), "r6i.xlarge": (4, 32)}
"""Processors and GiB of memory, from AWS's list."""
DAEMONS_CPU, DAEMONS_GIB = 0.5, 1.0
"""What is kept from pods on an EKS node of this size, and what its daemons, DNS and the driver of disks request."""


def test_several_heads_share_a_node() -> None:
    (head_types,) = [
        b[name]["default"] for b in terraform()["variable"] for name in b if "head_types" in name
    ]
    job = MANIFESTS["kuberay/quickstart/rayjob.yaml:RayJob"]["spec"]["rayClusterSpec"]
    (container,) = job["headGroupSpec"]["template"]["spec"]["containers"]
    requests = [container["resources"]["requests"], job["autoscalerOptions"]["resources"]["requests"]]
    cpu = sum(float(r["cpu"].removesuffix("m")) / (1000 if r["cpu"].endswith("m") else 1) for r in requests)
    gib = sum(float(r["memory"].removesuffix("Gi")) for r in requests)
    for name in head_types:
        processors, memory = MACHINES[name.strip('"')]
        assert int(min((processors - DAEMONS_CPU) / cpu, (0.97 * memory - DAEMONS_GIB) / gib)) >= 3


def test_terraform_has_spot_workers_an_on_demand_head_and_a_closed_bucket() -> None:
    resources = resources_of_terraform()
    kinds = {
        name: group["capacity_type"].strip('"') for name, group in resources["aws_eks_node_group"].items()
    }
    assert kinds == {"head": "ON_DEMAND", "spot": "SPOT", "on_demand": "ON_DEMAND"}
    (closed,) = resources["aws_s3_bucket_public_access_block"].values()
    assert [closed[k] for k in closed if k.startswith(("block_", "ignore_", "restrict_"))] == [True] * 4
    node = resources["aws_launch_template"]["node"]
    (metadata,) = node["metadata_options"]
    assert metadata["http_tokens"].strip('"') == "required"
    # From within a container the metadata are two hops away.
    hops = {"head": 1, "worker": "${var.notices ? 2 : 1}"}
    assert (node["for_each"], metadata["http_put_response_hop_limit"]) == (hops, "${each.value}")
    for name, group in resources["aws_eks_node_group"].items():
        key = "head" if name == "head" else "worker"
        assert f'node["{key}"]' in group["launch_template"][0]["id"], name


def test_the_runbook_quotes_what_the_program_says() -> None:
    """Each quoted message is a text of the source, its numbers and names written as …"""
    sources = "".join(
        p.read_text() for p in (ROOT / name for name in ("orchestrator", "cluster")) for p in p.rglob("*.py")
    )
    said = re.sub(r'"\s*\n\s*f?"', "", sources)
    quotes = re.findall(r"^- `(.+?)`", (INFRA / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert len(quotes) > 10

    def pattern(quote: str) -> str:
        return r"[^\n]*?".join(re.escape(part.strip()) for part in quote.split("…") if part.strip())

    assert [quote for quote in quotes if not re.search(pattern(quote), said)] == []


def test_the_readme_names_every_file() -> None:
    text = (INFRA / "README.md").read_text()
    for path in FILES:
        relative = path.relative_to(INFRA)
        names = [str(relative), *(f"{parent}/" for parent in relative.parents if str(parent) != ".")]
        assert relative.name == "README.md" or any(f"`{name}`" in text for name in names), relative


def find(value: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from find(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, key)

"""Each rule refuses what it is for: a good manifest, one thing broken, one line."""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.extensions.render import kuberay
from orchestrator.extensions.render.checks import RULES, check
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.manifests import violations
from orchestrator.extensions.render.pods import Kubernetes

Manifest = dict[str, Any]
NEEDS = ClusterNeeds("good", "image:1", 1, 4, gpu=1, accelerators=("H100", "A100"))


def groups(m: Manifest) -> list[Manifest]:
    found: list[Manifest] = m["spec"]["workerGroupSpecs"]
    return found


def container(m: Manifest) -> Manifest:
    found: Manifest = groups(m)[0]["template"]["spec"]["containers"][0]
    return found


def put(at: Callable[[Manifest], Manifest], **fields: Any) -> Callable[[Manifest], None]:
    return lambda m: at(m).update(fields)


def redis(m: Manifest) -> Manifest:
    found: Manifest = m["spec"]["gcsFaultToleranceOptions"]["redisPassword"]
    return found


BROKEN: list[tuple[str, Callable[[Manifest], None], str]] = [
    (
        "manifests_can_be_applied",
        lambda m: container(m)["env"].append({"name": "LONG", "value": "ä" * 2**17}),
        " KiB long, and kubectl applies 252; name many files by one pattern",
    ),
    ("names_are_dns_labels", put(lambda m: m["metadata"], name="Bad_Name"), "metadata.name: 'Bad_Name'"),
    ("names_are_dns_labels", put(lambda m: m["metadata"], name="a" * 54), "at most 53"),
    ("names_are_dns_labels", put(lambda m: m["metadata"], name="1a"), "'1a' is not a DNS label"),
    ("names_are_dns_labels", put(lambda m: groups(m)[1], groupName="A.b"), "workerGroupSpecs[1].groupName"),
    ("references_are_dns_names", put(lambda m: m["metadata"], namespace="Foo_Bar"), "metadata.namespace"),
    ("references_are_dns_names", put(lambda m: m["metadata"], namespace="a.b"), "'a.b' is not a DNS label"),
    ("references_are_dns_names", put(lambda m: m["metadata"], namespace="a" * 64), "at most 63"),
    (
        "references_are_dns_names",
        put(lambda m: m["spec"]["authOptions"], secretName="Foo_B"),
        "authOptions.secretName: 'Foo_B'",
    ),
    (
        "references_are_dns_names",
        put(lambda m: container(m)["env"][0]["valueFrom"]["secretKeyRef"], name="a..b"),
        "Secret of AWS_ACCESS_KEY_ID: 'a..b'",
    ),
    (
        "references_are_dns_names",
        put(lambda m: groups(m)[0]["template"]["spec"], serviceAccountName="A_B"),
        "group 'h100': serviceAccountName: 'A_B'",
    ),
    (
        "references_are_dns_names",
        lambda m: groups(m)[0]["template"]["spec"]["volumes"].append(
            {"name": "runs", "persistentVolumeClaim": {"claimName": "A_B"}}
        ),
        "group 'h100': claimName: 'A_B'",
    ),
    ("group_names_are_unique", put(lambda m: groups(m)[1], groupName="h100"), "two groups are named 'h100'"),
    ("replicas_are_ordered", put(lambda m: groups(m)[0], minReplicas=5), "minReplicas 5 and maxReplicas 4"),
    ("replicas_are_ordered", put(lambda m: groups(m)[0], minReplicas=-1, replicas=0), "minReplicas -1"),
    ("replicas_are_ordered", put(lambda m: groups(m)[0], replicas=9), "replicas 9 is outside 1 to 4"),
    (
        "replicas_are_ordered",
        lambda m: groups(m)[0].pop("minReplicas") and put(lambda m: groups(m)[0], maxReplicas=-2)(m),
        "maxReplicas -2",
    ),
    (
        "pods_are_replaced_not_restarted",
        put(lambda m: groups(m)[0]["template"]["spec"], restartPolicy="Always"),
        "takes only Never",
    ),
    (
        "nothing_runs_as_root",
        lambda m: m["spec"]["headGroupSpec"]["template"]["spec"].pop("securityContext"),
        "head: may run as root",
    ),
    ("nothing_runs_as_root", lambda m: container(m).pop("securityContext"), "may gain privileges"),
    (
        "containers_have_bounds",
        lambda m: container(m)["resources"]["limits"].pop("memory"),
        "no limit of memory",
    ),
    (
        "quantities_have_one_unit",
        put(lambda m: container(m)["resources"]["limits"], memory="1331200mMi"),
        "group 'h100': limits of memory are '1331200mMi'",
    ),
    (
        "quantities_have_one_unit",
        put(lambda m: container(m)["resources"]["requests"], cpu="-1"),
        "requests of cpu are '-1'",
    ),
    (
        "authentication_is_on",
        put(lambda m: m["spec"], authOptions={"mode": "disabled"}),
        "authentication is off",
    ),
    ("authentication_is_on", lambda m: m["spec"].pop("authOptions"), "authentication is off"),
    (
        "secrets_are_references",
        lambda m: container(m)["env"].append({"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}),
        "carries its value",
    ),
    ("secrets_are_references", put(redis, value="x"), "redisPassword: carries its value"),
]


@pytest.mark.parametrize(("rule", "breaks", "says"), BROKEN)
def test_each_rule_refuses_what_it_is_for(rule: str, breaks: Callable[[Manifest], None], says: str) -> None:
    manifest = kuberay.ray_cluster(NEEDS, Kubernetes())
    assert check(manifest) == []
    breaks(manifest)
    lines = check(manifest)
    assert len(lines) == 1
    assert says in lines[0]
    assert lines == list(next(r for r in RULES if r.__name__ == rule)(manifest))


def test_every_rule_has_a_case_that_breaks_it() -> None:
    assert {name for name, _, _ in BROKEN} == {rule.__name__ for rule in RULES}


def test_names_that_a_server_takes_are_taken() -> None:
    kubernetes = Kubernetes("1st-team", "keys.v2", "trainer.a", "1-runs")
    assert check(kuberay.ray_job(NEEDS, kubernetes)) == []


def test_a_generated_name_has_five_characters_more() -> None:
    job = kuberay.ray_job(NEEDS, Kubernetes())
    del job["metadata"]["name"]
    job["metadata"]["generateName"] = "a" * 42
    assert check(job) == []
    job["metadata"]["generateName"] += "b"
    assert "at most 47" in check(job)[0]
    del job["metadata"]["generateName"]
    job["metadata"]["name"] = ""
    assert check(job) != []


def test_a_switch_is_no_secret_whatever_its_name() -> None:
    manifest = kuberay.ray_cluster(NEEDS, Kubernetes())
    container(manifest)["env"].append({"name": "RAY_ENABLE_K8S_TOKEN_AUTH", "value": "true"})
    assert check(manifest) == []


def test_a_job_name_leaves_room_for_its_cluster() -> None:
    job = kuberay.ray_job(NEEDS, Kubernetes())
    job["metadata"]["name"] = "a" * 48
    assert "at most 47" in check(job)[0]


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (put(lambda m: m["spec"], workers=1), "'workers' was unexpected"),
        (put(container, imagee="x"), "'imagee' was unexpected"),
        (put(lambda m: groups(m)[0], minReplicas="1"), "not of type 'integer'"),
        (put(lambda m: container(m)["resources"]["limits"], memory="4 gigabytes"), "does not match"),
        (put(lambda m: m["spec"]["authOptions"], mode="tokens"), "is not one of"),
        (lambda m: m["spec"].pop("headGroupSpec"), "'headGroupSpec' is a required property"),
    ],
)
def test_kuberays_schema_is_strict(
    breaks: Callable[[Manifest], None], says: str, schemas: dict[str, Any]
) -> None:
    manifest = kuberay.ray_cluster(NEEDS, Kubernetes())
    breaks(manifest)
    assert any(says in line for line in violations(manifest, schemas))


def test_a_field_with_a_default_may_be_absent(schemas: dict[str, Any]) -> None:
    manifest = kuberay.ray_cluster(NEEDS, Kubernetes())
    del groups(manifest)[0]["minReplicas"], groups(manifest)[0]["maxReplicas"]
    assert violations(manifest, schemas) == []
